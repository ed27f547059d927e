"""The part `static`: static embeddings of the tokenizer alone, sentence-transformers, the engine and the service over HTTP.

Every request has 32 texts of 14 words. No text is sent to the engine or the service twice.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import uvloop
from onnx import numpy_helper

from export import contract
from loadtest.common import texts, wrk
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Row
from loadtest.common.server import Server, Service
from loadtest.in_process.engine import opened
from loadtest.in_process.steps import calls_per_s
from service.call import Call
from service.encoding.request import EncodeRequest
from service.tokenization.texts import Cut, TextEncoder

REQUEST_TEXTS, CONCURRENT = 32, 8  # texts of a request, and requests at a time
MOST_TEXTS_PER_S = 60_000  # more texts are prepared than a measurement can use
PEER, SERVICE = "sentence-transformers", "attnserve"


def benchmark(plan: Plan) -> Benchmark:
    bundle, manifest = plan.bundles[0], contract.verify(plan.bundles[0])
    encoder = TextEncoder(
        bundle / contract.TOKENIZER,
        max_tokens=manifest.limits.max_tokens,
        vocab_size=manifest.limits.vocab_size,
        pair_types=False,
        prompts={},
        default_prompt=None,
    )
    turns = iter(range(10**6))

    def requests() -> Iterator[list[str]]:
        """Yield requests of new texts, as many as a measurement can use."""
        made = iter(texts.short(round(MOST_TEXTS_PER_S * plan.seconds) + REQUEST_TEXTS, f"{next(turns)}"))
        return iter(lambda: list(itertools.islice(made, REQUEST_TEXTS)), [])

    def alone(answer: Callable[[list[str]], Any], _: object) -> Figures:
        """Measure a function that computes one request at a time, and remembers no text."""
        again = itertools.cycle(list(requests()))
        answer(next(again))
        return {"texts": REQUEST_TEXTS * calls_per_s(lambda: answer(next(again)), plan.seconds)}

    def over_http(server: Server) -> Figures:
        found = {}
        for encoding in ("base64", "float"):
            bodies = [json.dumps({"model": server.model, "input": batch, "encoding_format": encoding}) for batch in requests()]
            load = wrk.run(server.url + server.path, bodies, connections=CONCURRENT, seconds=plan.seconds)
            found[encoding] = Figure(load.per_s * REQUEST_TEXTS, problem="; ".join(load.problems))
        return found

    sides = [
        Side("tokenizer", {"tokenizer": partial(alone, lambda batch: encoder.encode(batch, cut=Cut()))}),
        Side(PEER, {"peer": partial(alone, sentence_transformers(bundle))}),
        Side("engine", {"engine": lambda _: {"texts": uvloop.run(engine_per_s(bundle, requests(), plan.seconds))}}),
        Side(SERVICE, {"service": over_http}, partial(Service, [bundle], model=manifest.name)),
    ]
    peer = (PEER, "texts")
    return Benchmark(
        sides,
        [
            Row("tokenizer alone, one thread, words kept", "texts/s", ("tokenizer", "texts")),
            Row("sentence-transformers, `encode` in this process", "texts/s", peer),
            Row("the engine without HTTP, beside sentence-transformers", "texts/s", ("engine", "texts"), peer),
            Row("HTTP, vectors in base64", "texts/s", (SERVICE, "base64"), peer),
            Row("HTTP, vectors as numbers", "texts/s", (SERVICE, "float"), peer),
        ],
    )


def sentence_transformers(bundle: Path) -> Callable[[list[str]], Any]:
    """Return `encode` of sentence-transformers with the bundle's table and tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from tokenizers import Tokenizer

    graph = onnx.load(bundle / contract.GRAPH).graph
    table = max((numpy_helper.to_array(each) for each in graph.initializer), key=lambda array: array.size)[:-1]  # its last row is padding
    module = StaticEmbedding(Tokenizer.from_file(str(bundle / contract.TOKENIZER)), embedding_weights=np.array(table, np.float32))
    model = SentenceTransformer(modules=[module, Normalize()], device="cpu")
    return lambda batch: model.encode(batch, batch_size=REQUEST_TEXTS, show_progress_bar=False)


async def engine_per_s(bundle: Path, work: Iterator[list[str]], seconds: float) -> float:
    """Return the texts per second of the engine without HTTP, with CONCURRENT requests at a time."""
    async with opened(bundle) as catalog:
        model: Any = next(iter(catalog.models.values()))
        started, count = time.perf_counter(), 0

        async def client() -> None:
            nonlocal count
            while time.perf_counter() < started + seconds:
                await model.answer(EncodeRequest(inputs=list(next(work))), Call("bench", time.monotonic()))
                count += REQUEST_TEXTS

        await asyncio.gather(*(client() for _ in range(CONCURRENT)))
        return count / (time.perf_counter() - started)
