"""The gated delta rule, with its short convolution, and with fewer heads of keys than of values."""

import math

import pytest
import torch
import torch.nn.functional as F

from models.attention.recurrent.gated_delta import GatedDeltaNet
from tests.models.attention.test_causal_layers import EXACT, D, tokens

H, H_K, D_K, D_V, K = 4, 2, 3, 5, 3


def make(*, n_key_heads: int = H_K) -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNet(D, H, d_head=D_K, n_key_heads=n_key_heads, d_value=D_V, kernel=K).double()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return layer


@torch.no_grad()
def test_token_by_token() -> None:
    """The recurrence of the paper, transposed, after a convolution over the last K tokens; then the gated norm of a head."""
    layer, x = make(), tokens(1, 7)
    mixed = torch.cat([layer.to_q(x), layer.to_k(x), layer.to_v(x)], dim=-1)[0]  # (N, D_c)
    weight = layer.convolution.weight[:, 0]  # (D_c, K), the newest token last
    y = torch.zeros_like(mixed)
    for t in range(7):
        y[t] = F.silu(sum(weight[:, K - 1 - back] * mixed[t - back] for back in range(min(K, t + 1))))
    q, k, v = y.split((H_K * D_K, H_K * D_K, H * D_V), dim=-1)
    beta, z = torch.sigmoid(layer.to_beta(x))[0], layer.to_gate(x)[0]
    alpha = torch.exp(-layer.A_log.exp() * F.softplus(layer.to_decay(x)[0] + layer.dt_bias))  # (N, H)
    o = torch.zeros(7, H, D_V, dtype=torch.float64)
    for h in range(H):
        S = torch.zeros(D_K, D_V, dtype=torch.float64)
        mine = slice(h // 2 * D_K, (h // 2 + 1) * D_K)  # two heads of values share a head of keys
        for t in range(7):
            q_t, k_t = (u[t, mine] / (u[t, mine].square().sum() + 1e-6).sqrt() for u in (q, k))
            v_t = v[t, h * D_V : (h + 1) * D_V]
            S = alpha[t, h] * (S - beta[t, h] * torch.outer(k_t, k_t) @ S) + beta[t, h] * torch.outer(k_t, v_t)
            o[t, h] = S.T @ q_t / math.sqrt(D_K)
    o = layer.norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (layer(x)[0] - layer.to_out(o.flatten(1) * F.silu(z))).abs().max() <= EXACT


@torch.no_grad()
def test_half_lives_begin_between_10_and_1000_tokens() -> None:
    layer = GatedDeltaNet(D, 3)
    half_lives = math.log(2) / (layer.A_log.exp() * F.softplus(layer.dt_bias))
    assert half_lives.tolist() == pytest.approx([10.0, 100.0, 1000.0], rel=1e-4)
