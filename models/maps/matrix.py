"""Computes the attention matrix of any layer: for each head, the weight of every token's value in every token's output.

Attention is linear in the values, o = A v, even if the layer never computes A (N, N). So A can be measured: the layer is run with its
own queries and keys, but with values that are 1 for one token and 0 for all others. Its output is then one column of A. As values have
D_v columns, one run measures D_v columns of A, and N / D_v runs are needed. A does not include what a layer does to v before the
attention (a short convolution, an activation) or to o after it (a norm, a gate).
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
    """Return the matrix A: x (B, N, D), key_mask bool (B, N) -> A (B, H, N, N), [.., query, key].

    H is 1 for gated attention units. Rows of padding are 0. positions: further arguments of the layer's forward, which are
    rotation, pair_mask or pair_bias. The layer is one of LAYERS and is not changed. If the layer averages values, each row of A sums
    to 1. If the layer is a recurrence followed by a norm, a row need not sum to 1 and may contain negative numbers.
    """
    read = _of_recurrence if layer.answers == "recurrence" else _of_unit_values
    A = read(layer, x, key_mask, positions)
    return A if key_mask is None else torch.where(key_mask[:, None, :, None], A, 0.0)


def _of_recurrence(layer: Any, x: Tensor, mask: Tensor | None, positions: dict[str, Any]) -> Tensor:
    """Return the attention matrix (B, H, N, N) of a recurrent layer for x (B, N, D).

    The recurrence is run a second time: with the q, k, decay and beta that the layer computes from x, and the identity matrix as values.
    """
    execution: Any = layer.recurrence
    caught: dict[str, Any] = {}

    def catch(q: Tensor, k: Tensor, v: Tensor, S: Tensor, **rates: Tensor | None) -> tuple[Tensor, Tensor]:
        caught.update(q=q, k=k, rates=rates)
        return execution(q, k, v, S, **rates)

    layer.recurrence = catch
    try:
        layer(x, mask, **positions)
    finally:
        del layer.recurrence  # restores the class's own `recurrence`
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
    """Within the `with` block, replace the values of every head by `units` (N, D_v) and set every gate to 1.

    Yields a list. Each run of the layer appends to it the input of the submodule that `layer.answers` names.
    """
    one = layer.value_of_one
    answers: list[Tensor] = []

    def give_units(module: nn.Module, inputs: Any, v: Tensor) -> Tensor:
        if v.dim() == 4:  # (B, H, N, D_v), from a projection per head
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
