"""ONNX forms of causal layers: recurrences and short convolutions as one operator each, and exact elementwise functions.

A state must have the same bits whatever the chunks of a prompt and the other rows of a batch. In onnxruntime's CPU provider, this fails for
Log, Softplus, Sin and Cos, which compute four numbers at a time and the rest by another formula (docs/decisions.md).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from onnxscript import FLOAT
from onnxscript import opset20 as op
from torch import Tensor, nn

from export.graphs.compact import operator, rows_at
from export.graphs.gated_delta import gated_delta_layer
from export.graphs.linear_attention import linear_layer
from export.graphs.sink_window import CallSlots, sink_window_layer
from models.attention.layers.causal import CausalLayer
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.layers.short_convolution import ShortConvolution
from models.attention.linear.causal_linear import CausalLinearAttention
from models.attention.linear.codebook import Codebook
from models.attention.linear.hedgehog import HedgehogMap
from models.attention.recurrent.gated_delta import GatedDeltaNet
from models.attention.sparse.causal_longformer import CausalLongformerAttention
from models.attention.sparse.sink_window import SinkWindowAttention
from models.attention.sparse.sliding_window import SlidingWindowAttention
from models.decoder.model import Decoder

# (whether decay is given, whether beta is given) -> value of the operator's attribute `update_rule`.
RULES = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}


@contextmanager
def with_operators(model: nn.Module, *, whole_layers: bool = False) -> Iterator[None]:
    """Within the `with` block, replace methods of the decoder or its layers by forms for the export, some of which torch cannot run.
    `whole_layers` also replaces whole layers by fewer operators, from which no attention matrix can be read.
    """
    slots = CallSlots()
    whole: tuple[tuple[type[nn.Module], str, Callable[[Any], Any]], ...] = (
        (GatedDeltaNet, "advance", gated_delta_layer),
        (CausalLinearAttention, "advance", linear_layer),
        (SinkWindowAttention, "advance", lambda layer: sink_window_layer(layer, slots)),
    )
    kinds: tuple[tuple[type[nn.Module], str, Callable[[Any], Any]], ...] = (
        *(whole if whole_layers else ()),
        (Decoder, "take", lambda decoder: rows_at),
        (CausalLayer, "recurrence", lambda layer: linear_attention),
        (ShortConvolution, "convolve", lambda convolution: causal_convolution),
        (SlidingWindowAttention, "attend", lambda layer: windows),
        (CausalLongformerAttention, "attend", lambda layer: windows),
        (HedgehogMap, "forward", hedgehog_map),
        (Codebook, "products", products_with_codes),
    )
    forms = [(module, name, form(module)) for module in model.modules() for kind, name, form in kinds if isinstance(module, kind)]
    for module, name, function in forms:
        setattr(module, name, function)
    try:
        yield
    finally:  # deletes the instances' replacements, so that the methods of the classes apply again
        for module, name, _ in forms:
            delattr(module, name)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor, *, decay: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `models.attention.layers.recurrence` as one operator, in float32. Inputs and outputs have the same shapes as there."""
    B, H, N, D_v = v.shape
    inputs = [*map(_heads_last, (q, k, v)), S, _heads_last(decay), _heads_last(beta)]
    rule = RULES[decay is not None, beta is not None]
    shapes = [(B, N, H * D_v), S.shape]
    o, S_new = operator("LinearAttention", inputs, shapes, q_num_heads=H, kv_num_heads=H, scale=1.0, update_rule=rule)
    return (split_heads(o, H) if H != 1 else o.unsqueeze(1)), S_new


def _heads_last(x: Tensor | None) -> Tensor | None:
    """Move the heads to the last axis: (B, H, N) -> (B, N, H), (B, H, N, D) -> (B, N, H * D). One head is not moved, to save a copy."""
    if x is None:
        return None
    if x.dim() == 4:
        return merge_heads(x.float()) if x.shape[1] != 1 else x.float().squeeze(1)
    return x.float().transpose(1, 2) if x.shape[1] != 1 else x.float().squeeze(1).unsqueeze(2)


def causal_convolution(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Compute `models.attention.layers.short_convolution.convolve` as one operator, whose own state includes padding and is not used."""
    shapes = [x.shape, past.shape]
    y, _ = operator("CausalConvWithState", [x, weight, None, past], shapes, ndim=1, channels_last=1, activation="none")
    return y


def windows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, present: Tensor, seen_first: Tensor | None = None) -> Tensor:
    """Compute `models.attention.sparse.windows.attend_to_windows` from a copy of each query's window, so that the order of summation is
    fixed.
    """
    N, n_first = q.shape[2], 0 if seen_first is None else seen_first.shape[-1]
    slots = torch.arange(N)[:, None] + torch.arange(k.shape[2] - n_first - N + 1)  # (N, window)
    seen = present[:, slots]  # (B, N, window)
    if seen_first is not None:
        slots = torch.cat([torch.arange(n_first).expand(N, -1), n_first + slots], dim=1)
        seen = torch.cat([seen_first, seen], dim=-1)
    k, v = k[:, :, slots], v[:, :, slots]  # (B, H, N, window, D_k)
    scores = (q.unsqueeze(3) @ k.transpose(3, 4)).squeeze(3) * scale  # (B, H, N, window)
    p = torch.softmax(
        torch.where(seen.unsqueeze(1), scores, torch.finfo(scores.dtype).min), dim=-1
    )  # every token sees itself, so no row is fully masked
    return (p.unsqueeze(3) @ v).squeeze(3)


def hedgehog_map(phi: HedgehogMap) -> Callable[[Tensor], Tensor]:
    """Return the map with one block-diagonal matrix for all heads, because products with one matrix per head depend on the batch."""
    H = phi.bias.shape[0]
    weight = torch.block_diag(*phi.weight.detach().mT)  # (H * D_k, H * D_k)
    bias = phi.bias.detach().flatten()

    def forward(x: Tensor) -> Tensor:
        y = split_heads(merge_heads(x) @ weight + bias, H)
        return torch.softmax(torch.cat([y, -y], dim=-1), dim=-1)

    return forward


def products_with_codes(codebook: Codebook) -> Callable[[Tensor], Tensor]:
    """Return a form of `Codebook.products` with one constant matrix per product, so that it has the same bits in any batch."""
    codes = codebook.codes.detach().mT.contiguous()  # (H, D_k, Z)

    def products(x: Tensor) -> Tensor:
        return torch.stack([x[:, h] @ codes[h] for h in range(codes.shape[0])], dim=1)

    return products


def _add(x: Any, y: Any, alpha: float = 1.0) -> Any:
    """Return x + alpha y. Constants below 1e-8, which prevent 0 / 0, are added by `Sum`, because torch's exporter drops their `Add`."""
    if isinstance(y, float) and 0 < abs(y) < LEAST_ADDEND:
        return op.Sum(x, op.CastLike(y, x))
    return op.Add(x, y if alpha == 1 else op.Mul(y, op.CastLike(alpha, y)))


def _log_softmax_with_0(x: FLOAT) -> FLOAT:
    """Return the log softmax of (0, x), (-softplus(x), log sigmoid(x)): (..) -> (.., 2). Each x is a row, so its bits are its own."""
    last = op.Constant(value_ints=[-1])
    column = op.Unsqueeze(x, last)
    return op.LogSoftmax(op.Concat(op.Sub(column, column), column, axis=-1), axis=-1)


def _softplus(x: FLOAT, beta: float = 1.0, threshold: float = 20.0) -> FLOAT:
    assert beta == 1.0, "only the softplus of log-decays has an exact form here"
    return op.Neg(op.Gather(_log_softmax_with_0(x), op.Constant(value_int=0), axis=-1))


def _log_sigmoid(x: FLOAT) -> FLOAT:
    return op.Gather(_log_softmax_with_0(x), op.Constant(value_int=1), axis=-1)


LEAST_ADDEND = 1e-7

FORMS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.add.Tensor: _add,
    torch.ops.aten.softplus.default: _softplus,
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
}
