"""What a layer attends to, as a matrix: which share of every token's value is in every token's answer, head by head.

Attention is linear in the values, o = A v, whether or not A (N, N) is ever formed. So A is read off: the layer is run with its own queries
and keys, but with values that are 1 for one token and 0 for all others, and what comes out is a column of A. A head takes D_v tokens at a
time, one in each of its columns: N / D_v runs. Short convolutions and activations of v come before A, norms and gates of o after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.attention.layers.mechanism import Mechanism
from models.attention.layers.multi_head import split_heads


@torch.no_grad()
def attention_matrix(layer: Mechanism, x: Tensor, key_mask: Tensor | None = None, **positions: Any) -> Tensor:
    """x (B, N, D), bool (B, N) -> A (B, H, N, N), [.., query, key]; H is 1 for gated attention units. Rows of padding are 0.

    positions: what else the layer's forward takes, rotation, pair_mask or pair_bias. The layer is one of LAYERS and is left as it was. Rows
    sum to 1 where it takes averages; those of a recurrence with a norm behind it need not, and may have negative numbers.
    """
    read = _of_recurrence if layer.answers == "recurrence" else _of_unit_values
    A = read(layer, x, key_mask, positions)
    return A if key_mask is None else torch.where(key_mask[:, None, :, None], A, 0.0)


def _of_recurrence(layer: Any, x: Tensor, mask: Tensor | None, positions: dict[str, Any]) -> Tensor:
    """Its queries, keys, decay and beta are caught on their way, and it is run once more, with N values of N columns."""
    execution: Any = layer.recurrence
    caught: dict[str, Any] = {}

    def catch(q: Tensor, k: Tensor, v: Tensor, S: Tensor, **rates: Tensor | None) -> tuple[Tensor, Tensor]:
        caught.update(q=q, k=k, rates=rates)
        return execution(q, k, v, S, **rates)

    layer.recurrence = catch
    try:
        layer(x, mask, **positions)
    finally:
        del layer.recurrence  # the class's own takes its place again
    q, k = caught["q"], caught["k"]  # (B, H, N, D_k)
    B, H, N, D_k = k.shape
    each = torch.eye(N, dtype=q.dtype, device=q.device).expand(B, H, N, N)
    return execution(q, k, each, each.new_zeros(B, H, D_k, N), **caught["rates"])[0]


def _of_unit_values(layer: Any, x: Tensor, mask: Tensor | None, positions: dict[str, Any]) -> Tensor:
    N, H = x.shape[1], getattr(layer, "n_heads", 1)
    D_v = layer.to_out.in_features // H
    each = torch.eye(N, dtype=x.dtype, device=x.device)
    columns = []
    for first in range(0, N, D_v):
        units = nn.functional.pad(each[:, first : first + D_v], (0, max(0, first + D_v - N)))  # (N, D_v)
        with _values_replaced(layer, units) as answers:
            layer(x, mask, **positions)
        o = answers[0]  # (B, H, N, D_v), or (B, N, H D_v)
        columns.append(o if o.dim() == 4 else split_heads(o, H))
    return torch.cat(columns, dim=-1)[..., :N]


@contextmanager
def _values_replaced(layer: Any, units: Tensor) -> Iterator[list[Tensor]]:
    """While it lasts, every head has these values (N, D_v), and every gate is open. Yields the inputs of `layer.answers`, one a run."""
    one = layer.value_of_one
    answers: list[Tensor] = []

    def give_units(module: nn.Module, inputs: Any, v: Tensor) -> Tensor:
        if v.dim() == 4:  # (B, H, N, D_v), of narrow heads
            return one * units.expand_as(v)
        return one * units.repeat(1, v.shape[-1] // units.shape[-1]).expand_as(v)  # (B, N, H_k D_v)

    def opened(value: float) -> Any:
        return lambda module, inputs, gate: torch.full_like(gate, value)

    hooks = [getattr(layer, name).register_forward_hook(give_units) for name in ("to_v", "to_v_global") if hasattr(layer, name)]
    hooks += [getattr(layer, name).register_forward_hook(opened(value)) for name, value in layer.gates]
    hooks.append(layer.get_submodule(layer.answers).register_forward_pre_hook(lambda module, inputs: answers.append(inputs[0])))
    try:
        yield answers
    finally:
        for hook in hooks:
            hook.remove()
