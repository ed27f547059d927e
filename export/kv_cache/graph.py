"""Exports a softmax decoder as a step graph with a KV cache: the baseline for decoders with states of constant size.

    python -m export.kv_cache.graph CHECKPOINT OUT

It uses `GroupQueryAttention`, onnxruntime's fastest operator for attention with a KV cache on a CPU. Its cache is allocated once and
updated in place.

A step after 4,096 tokens (8 heads of width 32, one thread, batch size 1 / 16) took 0.5 / 5.7 ms with it. It took 0.9 / 16 ms
with `MultiHeadAttention` and 1.2 / 10 ms with `Attention` (opset 23), which copy their cache in every step, and 0.5 / 8.7 ms
with `DecoderMaskedMultiHeadAttention`, which takes only one token per call.

OUT contains model.onnx (and .data) and tokenizer.json. It is not a bundle and cannot be served; `session.py` runs it. In a call, all
rows get the same number of tokens.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.decoder_parity import TOLERANCE
from export.checks.parity import largest_error
from export.errors import ExportError
from export.graphs.compact import OPERATORS
from export.graphs.decoder_operators import FORMS
from export.graphs.decoder_step import OPSET
from export.graphs.onnx_file import optimise, weight_file
from export.graphs.packed_encoder import with_children
from export.graphs.torch_graph import TorchGraph
from export.kv_cache.session import CachedSession
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.multi_head import merge_heads
from models.checkpoints.decoder import load_decoder
from models.decoder.model import Decoder
from models.parts.positions import Rotation


def export_cached(checkpoint: Path, out: Path) -> Path:
    """Write the graph of a decoder whose layers are all `causal_softmax`, checked against torch, and return its file.

    Raises CheckpointError for an invalid folder, ExportError for a decoder with other layers or with learned positions.
    """
    source = load_decoder(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as scratch:
        cached_graph(source.model).export(Path(scratch) / "traced.onnx", weights_beside=True)
        graph = optimise(Path(scratch) / "traced.onnx", Path(scratch) / "optimised")
        _check(graph, source.model)
        for file in (graph, weight_file(graph)):
            file.replace(out / file.name)
    shutil.copyfile(source.tokenizer_file, out / contract.TOKENIZER)
    return out / graph.name


class CachedAttention(nn.Module):
    """`CausalSoftmaxAttention` with a cache (B, H_k, T, D_k) for T tokens. Each call writes the keys and values of new tokens into it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: None, state: dict[str, Tensor], *, rotation: Rotation | None) -> tuple[Tensor, dict[str, Tensor]]:
        layer = self.layer
        q, k, v = (merge_heads(head) for head in layer.heads(x, rotation))
        o, keys, values = torch.onnx.ops.symbolic_multi_out(
            f"{OPERATORS}::GroupQueryAttention",
            [q, k, v, state["k"], state["v"], state["last"], state["total"]],
            attrs={"num_heads": layer.n_heads, "kv_num_heads": layer.n_kv_heads, "scale": layer.d_head**-0.5},
            dtypes=(x.dtype, x.dtype, x.dtype),
            shapes=(q.shape, state["k"].shape, state["v"].shape),
            version=1,
        )
        return layer.to_out(o), {"k": keys, "v": values}


class CachedStep(nn.Module):
    """Maps tokens (B, N), positions (B,), wanted (B, M), and each layer's caches (B, H_k, T, D_k) to logits (B, M, V) and new caches."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        blocks = [with_children(block, layer=CachedAttention(block.layer)) for block in decoder.blocks]
        self.decoder = with_children(decoder, blocks=nn.ModuleList(blocks))

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        last = (positions + (tokens.shape[1] - 1)).int()  # (B,) the index of each row's newest token
        shared = {"last": last, "total": last.max() + 1}
        states = [{"k": k, "v": v} | shared for k, v in zip(caches[::2], caches[1::2], strict=True)]
        logits, new = self.decoder(tokens, None, states, positions, wanted)
        return logits, *(state[name] for state in new for name in ("k", "v"))


def cached_graph(decoder: Decoder) -> TorchGraph:
    """Return the decoder as a graph with a KV cache. Raises ExportError for a decoder with other layers or with learned positions."""
    layers: list[Any] = [block.layer for block in decoder.blocks]
    if not all(isinstance(layer, CausalSoftmaxAttention) for layer in layers):
        raise ExportError(
            f"the layers are {', '.join(sorted(set(decoder.config.layer_names)))}, and only causal_softmax layers have a KV cache here"
        )
    if (longest := decoder.config.n_positions) is not None:
        raise ExportError(
            f"n_positions={longest} learned positions are a limit, but the cache is for texts of any length: train without them"
        )
    cache = ("B", layers[0].n_kv_heads, "T", layers[0].d_head)
    names = [f"state_{number}_{name}" for number in range(len(layers)) for name in ("k", "v")]
    shapes = {contract.TOKENS: ("B", "N"), contract.POSITIONS: ("B",), contract.WANTED: ("B", "M")}
    numbers = (contract.int64(name, *shape) for name, shape in shapes.items())
    caches, new = ([contract.float32(prefix + name, *cache) for name in names] for prefix in ("", "new_"))
    logits = contract.float32(contract.STEP_LOGITS, "B", "M", decoder.config.vocab_size)
    sizes = {"B": 3, "N": 7, "M": 2, "T": 11}
    return TorchGraph(CachedStep(decoder), (*numbers, *caches), (logits, *new), sizes, opset=OPSET, forms=FORMS)


def _check(graph: Path, decoder: Decoder) -> None:
    """Compare a prompt and some steps of three rows with torch. Raises ExportError if the results differ."""
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (3, 40))
    with torch.inference_mode():
        want = decoder(torch.from_numpy(tokens))[0].numpy()
    session = CachedSession(graph, rows=3, capacity=64, threads=1)
    for begin, end in ((0, 33), *((t, t + 1) for t in range(33, 40))):
        largest_error(session.run(tokens[:, begin:end]), want[:, end - 1], TOLERANCE, f"logits: after {end} tokens the graph is")


if __name__ == "__main__":
    print(export_cached(Path(sys.argv[1]), Path(sys.argv[2])))
