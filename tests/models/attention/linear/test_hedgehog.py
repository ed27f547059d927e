"""Hedgehog: a positive feature map that can learn the weights of softmax attention."""

import torch
from torch import Tensor

from models.attention.linear.hedgehog import HedgehogMap
from tests.models.attention.test_causal_layers import EXACT, D, H, heads, make, projected, tokens

D_K = D // H


def weights_of(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    """Each token's weights over its past and itself: (.., N, D_φ) twice -> (.., N, N)."""
    similar = (phi_q @ phi_k.mT).tril()
    return similar / similar.sum(-1, keepdim=True)


def test_features_are_positive_and_begin_as_the_softmax_of_x_and_minus_x() -> None:
    x = tokens(2, 5).unflatten(-1, (H, -1)).transpose(1, 2)
    features = HedgehogMap(H, D_K).double()(x)
    assert (features > 0).all()
    assert (features - torch.softmax(torch.cat([x, -x], dim=-1), dim=-1)).abs().max() <= EXACT


@torch.no_grad()
def test_pair_by_pair() -> None:
    """Each head has a map of its own for queries, and one for keys."""
    layer, x = make("hedgehog"), tokens(2, 9)
    q, k, v = heads(layer, x)
    o = torch.zeros_like(v)
    for h in range(H):
        phi_q, phi_k = (
            torch.softmax(torch.cat([u, -u], dim=-1), dim=-1)
            for u in (t[:, h] @ phi.weight[h].T + phi.bias[h] for t, phi in ((q, layer.phi_q), (k, layer.phi_k)))
        )
        o[:, h] = weights_of(phi_q, phi_k) @ v[:, h]
    assert (layer(x)[0] - projected(layer, o)).abs().max() <= 1e-8  # the eps beside features of about 1e-1
