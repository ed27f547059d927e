"""Based: the Taylor expansion of the exponential, as a feature map."""

import torch

from models.attention.linear.based import BasedAttention, taylor
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens


def test_features_multiply_to_the_expansion() -> None:
    q, k = tokens(2, 9), tokens(2, 9, seed=2)
    s = q @ k.mT / D**0.5
    similar = taylor(q) @ taylor(k).mT
    assert (similar - (1 + s + s**2 / 2)).abs().max() <= EXACT
    assert (similar >= 0.5 - EXACT).all()
    small = 0.01 * q @ k.mT / D**0.5
    assert (taylor(0.1 * q) @ taylor(0.1 * k).mT - small.exp()).abs().max() <= small.abs().max() ** 3


@torch.no_grad()
def test_pair_by_pair() -> None:
    layer, x = make("based"), tokens(1, 7)
    q, k, v = heads(layer, x)
    o = torch.zeros_like(v)
    for h in range(H):
        for i in range(7):
            scores = [float(q[0, h, i] @ k[0, h, j]) / 4 for j in range(i + 1)]  # √16
            weights = [1 + s + s**2 / 2 for s in scores]
            o[0, h, i] = sum(w * v[0, h, j] for j, w in enumerate(weights)) / (sum(weights) + 1e-6)
    assert (layer(x)[0] - projected(layer, o)).abs().max() <= EXACT


def test_keys_have_16_columns_whatever_the_width_of_a_head() -> None:
    layer = BasedAttention(64, 2)
    assert layer.to_k.out_features == 2 * 16
    assert layer.state_shapes == {"S": (2, 273, 33)}
