"""The delta rule: what is written under a key replaces what was there."""

import math

import pytest
import torch
from torch import Tensor, nn

from models.attention.recurrent.delta import DeltaNet, unit
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens

NEARLY_1 = 1e-5  # |k|² is 1 / (1 + eps) with eps = 1e-6


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


def writer(beta: float) -> DeltaNet:
    """A layer of one head of width 4 that takes the first half of a token for the key and the second for the value."""
    layer = DeltaNet(8, 1, d_head=4, bias=True).double()
    for to, half in ((layer.to_k, 0), (layer.to_v, 4)):
        to.weight.data = torch.eye(8, dtype=torch.float64)[half : half + 4]
        nn.init.zeros_(to.bias)
    nn.init.zeros_(layer.to_beta.weight)
    nn.init.constant_(layer.to_beta.bias, torch.logit(torch.tensor(beta, dtype=torch.float64)))
    return layer


def write(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Keys with their values -> a sequence for `writer`."""
    return torch.stack([torch.cat(pair) for pair in pairs])[None].double()


@torch.no_grad()
def test_values_come_back_by_their_keys_whatever_the_keys_are_long() -> None:
    keys, values = torch.eye(4), torch.arange(16.0).view(4, 4)
    _, state = writer(1.0)(write(*((3 * key, value) for key, value in zip(keys, values, strict=True))))
    assert (state["S"][0, 0].T @ keys.double() - values.T).abs().max() <= NEARLY_1 * 16


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 5.0), (0.5, 3.0), (0.0, 0.0)])
@torch.no_grad()
def test_a_second_value_replaces_the_first_as_far_as_beta_says(beta: float, expected: float) -> None:
    """2 and then 5 under one key: 5; 0 + 1/2 of 2, and from there half of the way to 5: 3; nothing."""
    key = torch.tensor([0.6, 0.8, 0, 0])
    _, state = writer(beta)(write((key, torch.full((4,), 2.0)), (key, torch.full((4,), 5.0))))
    assert (state["S"][0, 0].T @ key.double() - expected).abs().max() <= NEARLY_1 * 5


def test_the_length_of_a_half_precision_vector_does_not_overflow() -> None:
    assert unit(torch.full((4,), 1e4, dtype=torch.float16)).tolist() == pytest.approx([0.5] * 4)
    assert unit(torch.zeros(4)).tolist() == [0.0] * 4
