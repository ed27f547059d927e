"""Retention: pairs of tokens weighted by γ to the power of their distance, each head with its own γ."""

import math

import pytest
import torch
import torch.nn.functional as F

from models.attention.recurrent.retention import log_gammas
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens


@torch.no_grad()
def test_pairs_fade_with_their_distance() -> None:
    """Eq. 5 of the paper, pair by pair, then the norm over a head's columns and the gate."""
    layer, x = make("retention"), tokens(1, 7)
    q, k, v = heads(layer, x)
    o = torch.zeros_like(v)
    for h in range(H):
        gamma = 1 - 2 ** (-5 - h)
        for i in range(7):
            for j in range(i + 1):
                o[0, h, i] += gamma ** (i - j) * float(q[0, h, i] @ k[0, h, j]) / math.sqrt(D // H) * v[0, h, j]
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    gate = F.silu(layer.to_gate(x)).unflatten(-1, (H, -1)).transpose(1, 2)
    assert (layer(x)[0] - projected(layer, gate * o)).abs().max() <= EXACT


def test_rates_are_those_of_the_paper() -> None:
    assert log_gammas(4).exp().tolist() == pytest.approx([31 / 32, 63 / 64, 127 / 128, 255 / 256], abs=1e-15)


@torch.no_grad()
def test_rates_are_not_rounded_with_the_weights() -> None:
    """In bfloat16, γ = 1 - 2⁻¹² would be 1: a state that began at 1 is γ after a token without a key."""
    layer = make("retention", n_heads=1, dtype=torch.bfloat16)
    torch.nn.init.zeros_(layer.to_k.weight)
    torch.nn.init.zeros_(layer.to_k.bias)
    state = {"S": torch.ones(1, *layer.state_shapes["S"])}
    _, state = layer(tokens(1, 1, dtype=torch.bfloat16), None, state)
    assert (state["S"] - 31 / 32).abs().max() <= 1e-7
