"""The delta rule: what is written under a key replaces what was there."""

import math

import pytest
import torch

from models.attention.recurrent.delta import unit
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens


@torch.no_grad()
def test_token_by_token() -> None:
    """S_t = S_{t-1} (I - β k kᵀ) + β v kᵀ, here transposed; then the norm of a head."""
    layer, x = make("delta"), tokens(1, 7)
    q, k, v = heads(layer, x)
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    beta = torch.sigmoid(layer.to_beta(x))
    o = torch.zeros_like(v)
    for h in range(H):
        S = torch.zeros(D // H, D // H, dtype=torch.float64)
        for t in range(7):
            K = torch.outer(k[0, h, t], k[0, h, t])
            S = S - beta[0, t, h] * K @ S + beta[0, t, h] * torch.outer(k[0, h, t], v[0, h, t])
            o[0, h, t] = S.T @ q[0, h, t] / math.sqrt(D // H)
    o = layer.norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (layer(x)[0] - projected(layer, o)).abs().max() <= EXACT


def test_the_length_of_a_half_precision_vector_does_not_overflow() -> None:
    assert unit(torch.full((4,), 1e4, dtype=torch.float16)).tolist() == pytest.approx([0.5] * 4)
    assert unit(torch.zeros(4)).tolist() == [0.0] * 4
