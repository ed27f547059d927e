"""The parts of `attnserve bench`, as data. The module of a part has a function `benchmark`, which makes a `Benchmark` of a `Plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MINILM, DECODER = "bundles/all-MiniLM-L6-v2", "bundles/python-gated-delta"


@dataclass(frozen=True)
class Part:
    """`bundles`: what is measured without `--bundle`. `options`: what `--set NAME=VALUE` takes, with the value without it."""

    about: str
    module: str
    bundles: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 3
    seconds: float = 3.0


PARTS = {
    "encoder": Part(
        "Embeddings: the service beside the bare runtime and infinity-emb; its memory and start.",
        "loadtest.bench.encoder",
        (MINILM,),
        {"peer": "out/peers/infinity"},
        seconds=10,
    ),
    "overhead": Part("The service around models that compute almost nothing, in its profiles.", "loadtest.bench.overhead", (MINILM,)),
    "split": Part(
        "Profile split beside single.", "loadtest.bench.split", (MINILM, DECODER), {"encoders": "1", "generators": "1"}, seconds=5
    ),
    "generate": Part(
        "Text: the service beside the engine, and the engine beside the bare step loop.",
        "loadtest.bench.generate",
        (DECODER,),
        {"slots": "32"},
        seconds=5,
    ),
    "published": Part(
        "SmolLM2: the engine beside transformers and, in another Python, llama.cpp.",
        "loadtest.in_process.published",
        ("bundles/smollm2",),
        {"gguf": "", "llama": ""},
    ),
    "states": Part(
        "States over HTTP: restored, forked, listed, beside prompts that are fed again.",
        "loadtest.bench.states",
        (DECODER,),
        {"store": "sqlite", "many": "1000"},
    ),
    "long": Part(
        "Long texts: an encoder of linear cost beside its teacher.",
        "loadtest.bench.long",
        ("bundles/all-MiniLM-L6-v2-linear", "bundles/all-MiniLM-L6-v2-repeated"),
    ),
    "retrieval": Part(
        "Search: several outputs of a run, MaxSim, chunks in context, texts that are cut, SPLADE beside sentence-transformers.",
        "loadtest.in_process.retrieval",
        ("bundles/splade-tiny", "bundles/all-MiniLM-L6-v2", "bundles/all-MiniLM-L6-v2-linear"),
        {"splade": ""},
    ),
    "static": Part(
        "Static embeddings: the engine and the service beside sentence-transformers.",
        "loadtest.in_process.static",
        ("bundles/wordllama",),
    ),
    "gpu": Part(
        "Graphs for GPUs, after their values are compared with those of the CPU.",
        "loadtest.in_process.gpu",
        (MINILM,),
        {
            "provider": "cuda",
            "texts": "1x16,32x16,256x16,1024x16,1x128,32x128,256x128,1x512,16x512,64x512",
            "gateways": "0",
        },
    ),
    "streams": Part(
        "Processes are killed or stopped while eight clients stream: no text may change.",
        "loadtest.faults.streams",
        (DECODER,),
        {"what": "kill", "count": "100", "seed": "0", "tokens": "600"},
        rounds=1,
    ),
}
