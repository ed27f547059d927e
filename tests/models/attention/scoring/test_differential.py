"""Differential attention against the paper's equations in NumPy, and its limits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.attention.scoring.differential import DifferentialAttention
from models.layers import LAYERS
from models.parts.positions import RotationTable
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

D, H, N = 24, 3, 9
D_K = D // H
SEEN = {"differential": np.ones((N, N), dtype=bool), "causal_differential": np.tri(N, dtype=bool)}


def make(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, bias=True, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def answer(layer: nn.Module, x: Tensor, **positions: object) -> Tensor:
    y = layer(x, **positions)
    return y[0] if layer.capabilities.causal else y


def softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    exps = np.where(seen, np.exp(scores), 0.0)
    return exps / exps.sum(-1, keepdims=True)


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Rotate the pairs of columns (j, j + d/2) of x (N, d) at position t by t base^(-2j/d)."""
    d, y = x.shape[1], x.copy()
    for t in range(len(x)):
        for j in range(d // 2):
            cos, sin = math.cos(t * base ** (-2 * j / d)), math.sin(t * base ** (-2 * j / d))
            y[t, j] = x[t, j] * cos - x[t, j + d // 2] * sin
            y[t, j + d // 2] = x[t, j + d // 2] * cos + x[t, j] * sin
    return y


def by_equations(layer: nn.Module, x: np.ndarray, seen: np.ndarray, first: float, base: float | None = None) -> np.ndarray:
    """(N, D) -> (N, D). Equations 1 to 3, head by head. A head's columns are those of q and q' in turns. With `base`, each of q, q', k
    and k' is rotated as a head of its own, as in microsoft/unilm, Diff-Transformer/multihead_diffattn.py."""
    weights = {key: value.detach().numpy() for key, value in layer.state_dict().items()}
    q, k, v = (x @ weights[f"to_{name}.weight"].T + weights[f"to_{name}.bias"] for name in "qkv")
    lq, lk, lq_2, lk_2 = weights["attend.factors"]
    subtracted = math.exp(lq @ lk) - math.exp(lq_2 @ lk_2) + first
    heads = []
    for h in range(H):
        own = slice(h * D_K, (h + 1) * D_K)
        q_h, k_h, v_h = q[:, own], k[:, own], v[:, own]
        halves = [(q_h[:, i::2], k_h[:, i::2]) for i in (0, 1)]
        if base is not None:
            halves = [(rotated(q_i, base), rotated(k_i, base)) for q_i, k_i in halves]
        scores = [q_i @ k_i.T / math.sqrt(D_K / 2) for q_i, k_i in halves]
        o = (softmax(scores[0], seen) - subtracted * softmax(scores[1], seen)) @ v_h
        o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * weights["attend.norm.weight"]
        heads.append((1 - first) * o)
    return np.concatenate(heads, axis=-1) @ weights["to_out.weight"].T + weights["to_out.bias"]


@in_one_test(("depth", "first"), [(None, 0.8), (1, 0.2), (3, 0.8 - 0.6 * math.exp(-0.6))])
@in_one_test("name", SEEN)
@torch.no_grad()
def test_it_computes_the_equations_of_the_paper(name: str, depth: int | None, first: float) -> None:
    layer, x = make(name, depth=depth), drawn(1, N, D, seed=1)
    assert np.abs(answer(layer, x)[0].numpy() - by_equations(layer, x[0].numpy(), SEEN[name], first)).max() <= EXACT


@in_one_test("name", SEEN)
@torch.no_grad()
def test_rotary_positions_rotate_both_groups_by_equal_angles(name: str) -> None:
    layer, x = make(name), drawn(1, N, D, seed=1)
    rotation = RotationTable(N, D_K, base=100.0, dtype=torch.float64)(torch.arange(N))
    want = by_equations(layer, x[0].numpy(), SEEN[name], 0.8, base=100.0)
    assert np.abs(answer(layer, x, rotation=rotation)[0].numpy() - want).max() <= EXACT


def test_what_does_not_fit_is_refused() -> None:
    layer = DifferentialAttention(6, 1)
    assert not layer.capabilities.rotates
    with pytest.raises(ValueError, match="DifferentialAttention supports no rotation"):
        layer(torch.zeros(1, 2, 6), rotation=RotationTable(2, 6, base=100.0)(torch.arange(2)))
