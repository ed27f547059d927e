"""Dot products as scores."""

import torch

from models.attention.scoring.dot import attend_dot
from tests.models.attention.scores import EXACT, by_loops, pairs, qkv, weights_of


def test_computes_what_the_loops_compute() -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    expected = by_loops(lambda h, q, k: q @ k, q, k, v, mask, bias)
    assert (attend_dot(q, k, v, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_scores_of_ten_thousand_stay_finite() -> None:
    q = torch.tensor([[100.0], [-100.0]], requires_grad=True)[None, None]
    k = torch.tensor([[100.0], [-100.0], [0.0]])[None, None]
    weights = weights_of(attend_dot, q, k)
    assert torch.equal(weights[0, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    (gradient,) = torch.autograd.grad(weights.square().sum(), q)
    assert torch.isfinite(gradient).all()
