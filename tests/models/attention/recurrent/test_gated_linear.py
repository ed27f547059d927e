"""Gated linear attention: every row of S fades at its own rate, which the token decides."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.causal import CausalLayer
from models.attention.recurrent.gated_linear import GatedLinearAttention
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens


def decays(layer: CausalLayer, x: Tensor) -> Tensor:
    """exp(a), (B, H, N, D_k)."""
    gates = torch.sigmoid(layer.to_decay(layer.to_low(x)) + layer.decay_bias) ** (1 / 16)
    return gates.unflatten(-1, (H, -1)).transpose(1, 2)


@torch.no_grad()
def test_token_by_token() -> None:
    """The recurrence of the paper, then the norm of a head and the gate."""
    layer, x = make("gated_linear"), tokens(1, 7)
    (q, k, v), alpha = heads(layer, x), decays(layer, x)
    o = torch.zeros_like(v)
    for h in range(H):
        S = torch.zeros(D // H, D // H, dtype=torch.float64)
        for t in range(7):
            S = torch.diag(alpha[0, h, t]) @ S + torch.outer(k[0, h, t], v[0, h, t])
            o[0, h, t] = S.T @ q[0, h, t] / math.sqrt(D // H)
    o = layer.norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    gate = F.silu(layer.to_gate(x)).unflatten(-1, (H, -1)).transpose(1, 2)
    assert (layer(x)[0] - projected(layer, gate * o)).abs().max() <= EXACT


@torch.no_grad()
def test_half_lives_begin_between_10_and_1000_tokens() -> None:
    layer = GatedLinearAttention(D, H)
    half_lives = math.log(0.5) / decays(layer, torch.zeros(1, 1, D)).log()[0, :, 0]  # (H, D_k)
    assert half_lives.T.flatten().tolist() == pytest.approx([10.0, 100.0, 1000.0] * (D // H), rel=1e-3)
