"""The softmax twin of a decoder as a step graph with a cache of keys and values: what a state of constant size is measured against.

    python -m export.kv_cache.graph CHECKPOINT OUT

The best that onnxruntime has on a CPU: `GroupQueryAttention` on a cache that is allocated once and written in place. A step of one token
after 4,096 (8 heads of 32, batch 1 / 16, one thread) took 0.5 / 5.7 ms with it, 0.9 / 16 ms with `MultiHeadAttention` and 1.2 / 10 ms with
`Attention` (opset 23), which copy their cache in every step, and 0.5 / 8.7 ms with `DecoderMaskedMultiHeadAttention`, of one token a call.

OUT gets model.onnx (and .data) and tokenizer.json. It is no bundle and is not served: `session.py` runs it. All rows of a batch
get the same number of tokens in a call.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.decoder_parity import TOLERANCE
from export.checks.parity import scale
from export.errors import ExportError
from export.graphs.decoder_operators import FORMS
from export.graphs.decoder_step import OPSET
from export.graphs.encoder import beside, optimise, quiet, strip
from export.graphs.packed_encoder import OPERATORS, with_children
from export.kv_cache.session import TwinSession
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.attention.layers.multi_head import merge_heads, split_heads
from models.checkpoints.decoder import load_decoder
from models.decoder.model import Decoder
from models.parts.positions import Rotation, rotate


def export_twin(checkpoint: Path, out: Path) -> Path:
    """Write the graph of a decoder whose layers are all `causal_softmax`, held against torch, and return its file."""
    source = load_decoder(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    traced = out / "traced.onnx"
    shutil.rmtree(out / "optimised", ignore_errors=True)
    try:
        trace_twin(source.model, traced)
        graph = optimise(traced, out / "optimised")
        _check(graph, source.model)
        for file in (graph, beside(graph)):
            file.replace(out / file.name)
        shutil.copyfile(source.tokenizer_file, out / contract.TOKENIZER)
    finally:
        traced.unlink(missing_ok=True)
        beside(traced).unlink(missing_ok=True)
        shutil.rmtree(out / "optimised", ignore_errors=True)
    return out / graph.name


class CachedAttention(nn.Module):
    """`CausalSoftmaxAttention` whose cache (B, H, T, D_k) has room for T tokens, and is written where the row's own tokens end."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: None, state: dict[str, Tensor], *, rotation: Rotation | None) -> tuple[Tensor, dict[str, Tensor]]:
        layer = self.layer
        q, k = (split_heads(project(x), layer.n_heads) for project in (layer.to_q, layer.to_k))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        v = layer.to_v(x)
        o, keys, values = torch.onnx.ops.symbolic_multi_out(
            f"{OPERATORS}::GroupQueryAttention",
            [merge_heads(q), merge_heads(k), v, state["k"], state["v"], state["last"], state["total"]],
            attrs={"num_heads": layer.n_heads, "kv_num_heads": layer.n_heads, "scale": layer.d_head**-0.5},
            dtypes=(x.dtype, x.dtype, x.dtype),
            shapes=(v.shape, state["k"].shape, state["v"].shape),
            version=1,
        )
        return layer.to_out(o), {"k": keys, "v": values}


class TwinStep(nn.Module):
    """tokens (B, N), positions (B,), wanted (B, M), then k and v of every layer (B, H, T, D_k) -> logits (B, M, V) and the caches."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        blocks = [with_children(block, layer=CachedAttention(block.layer)) for block in decoder.blocks]
        self.decoder = with_children(decoder, blocks=nn.ModuleList(blocks))

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        last = (positions + (tokens.shape[1] - 1)).int()  # (B,): where each row's newest token stands
        shared = {"last": last, "total": last.max() + 1}
        states = [{"k": k, "v": v} | shared for k, v in zip(caches[::2], caches[1::2], strict=True)]
        logits, new = self.decoder(tokens, None, states, positions, wanted)
        return logits, *(state[name] for state in new for name in ("k", "v"))


def trace_twin(decoder: Decoder, file: Path) -> None:
    """Raises ExportError for a decoder with other layers, or with learned positions."""
    layers: list[Any] = [block.layer for block in decoder.blocks]
    if not all(isinstance(layer, CausalSoftmaxAttention) for layer in layers):
        raise ExportError(f"the twin of {', '.join(sorted(set(decoder.config.layer_names)))} has only causal_softmax layers: train one")
    if (longest := decoder.config.n_positions) is not None:
        raise ExportError(f"n_positions={longest} learned positions end, and a twin is for texts without end: train one with others")
    B, N, M, T = (torch.export.Dim(letter) for letter in "BNMT")
    names = [f"state_{number}_{name}" for number in range(len(layers)) for name in ("k", "v")]
    caches = [torch.zeros(3, layer.n_heads, 11, layer.d_head) for layer in layers for _ in ("k", "v")]
    ids: Any = (torch.ones(3, 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64))
    with quiet():
        torch.onnx.export(
            TwinStep(decoder),
            (*ids, *caches),
            file,
            dynamo=True,
            dynamic_shapes=({0: B, 1: N}, {0: B}, {0: B, 1: M}, tuple({0: B, 2: T} for _ in caches)),
            input_names=[contract.TOKENS, contract.POSITIONS, contract.WANTED, *names],
            output_names=[contract.STEP_LOGITS, *(f"new_{name}" for name in names)],
            opset_version=OPSET,
            custom_translation_table=FORMS,
            external_data=True,
            verbose=False,
        )
    strip(file)


def _check(graph: Path, decoder: Decoder) -> None:
    """A prompt and some steps of three rows, against torch. Raises ExportError where they differ."""
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (3, 40))
    with torch.inference_mode():
        want = decoder(torch.from_numpy(tokens))[0].numpy()
    session = TwinSession(graph, rows=3, capacity=64, threads=1)
    for begin, end in ((0, 33), *((t, t + 1) for t in range(33, 40))):
        got = session.run(tokens[:, begin:end])
        error, allowed = float(np.abs(got - want[:, end - 1]).max()), TOLERANCE * scale(want)
        if not error <= allowed:
            raise ExportError(f"logits: after {end} tokens the graph is {error:.3g} away from the model, and {allowed:.3g} is allowed")


if __name__ == "__main__":
    print(export_twin(Path(sys.argv[1]), Path(sys.argv[2])))
