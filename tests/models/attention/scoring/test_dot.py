"""Dot products as scores."""

import torch
import torch.nn.functional as F

from models.attention.scoring.dot import attend_dot
from tests.models.attention.scores import EXACT, by_loops, drawn, pairs, qkv, weights_of


def test_computes_what_the_loops_compute() -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    expected = by_loops(lambda h, q, k: q @ k, q, k, v, mask, bias)
    assert (attend_dot(q, k, v, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_equals_torch_without_its_scale() -> None:
    q, k, v = qkv()
    assert (attend_dot(q, k, v) - F.scaled_dot_product_attention(q, k, v, scale=1.0)).abs().max() <= EXACT


def test_the_variance_of_a_score_is_the_width_of_a_head() -> None:
    for D_k in (4, 64):
        q, k = drawn(20_000, D_k, seed=1), drawn(20_000, D_k, seed=2)
        assert abs((q * k).sum(-1).var() / D_k - 1) < 0.05  # 20,000 draws know a variance to 1 or 2 %


def test_what_all_keys_have_in_common_changes_nothing() -> None:
    """q . (k + c) = q . k + a number of the query."""
    q, k, v = qkv()
    assert (attend_dot(q, k + drawn(4, seed=6), v) - attend_dot(q, k, v)).abs().max() <= EXACT


def test_scores_of_ten_thousand_stay_finite() -> None:
    q = torch.tensor([[100.0], [-100.0]], requires_grad=True)[None, None]
    k = torch.tensor([[100.0], [-100.0], [0.0]])[None, None]
    weights = weights_of(attend_dot, q, k)
    assert torch.equal(weights[0, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    (gradient,) = torch.autograd.grad(weights.square().sum(), q)
    assert torch.isfinite(gradient).all()
