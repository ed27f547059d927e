"""Cosines as scores."""

import math

import torch
import torch.nn.functional as F

from models.attention.scoring.cosine import LARGEST_TAU, CosineAttention, attend_cosine
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, H, by_loops, drawn, pairs, qkv


def test_computes_what_the_loops_compute() -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    tau = torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    expected = by_loops(lambda h, q, k: tau[h] * F.cosine_similarity(q, k, dim=0), q, k, v, mask, bias)
    assert (attend_cosine(q, k, v, tau=tau, mask=mask, bias=bias) - expected).abs().max() <= EXACT


@in_one_test("dtype", [torch.float16, torch.float32, torch.float64])
def test_vectors_of_length_zero_are_finite_and_so_are_their_gradients(dtype: torch.dtype) -> None:
    """A query of 0 takes the mean of all values. Its gradient, of size tau / eps, is beyond float16."""
    q, k, v = (x.to(dtype) for x in qkv())
    q[:, :, 0], k[:, :, 0] = 0, 0
    q, k = q.requires_grad_(), k.requires_grad_()
    o = attend_cosine(q, k, v, tau=10.0)
    assert (o[:, :, 0] - v.mean(2)).abs().max() <= 4 * torch.finfo(dtype).eps
    o.square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k)) or dtype == torch.float16


def test_a_small_vector_counts_by_its_length_below_eps() -> None:
    q, k, v = qkv()
    small = attend_cosine(1e-9 * F.normalize(q, dim=-1), k, v, tau=10.0, eps=1e-6)
    assert (small - attend_cosine(q, k, v, tau=10.0 * 1e-3)).abs().max() <= EXACT


def test_a_head_begins_at_ten_and_is_held_at_a_hundred() -> None:
    layer, x = CosineAttention(12, H).double(), drawn(2, 5, 12, seed=1)
    assert (layer.attend.log_tau.exp() - 10).abs().max() <= 1e-5
    at = {}
    for tau in (LARGEST_TAU, 1e6):
        layer.attend.log_tau.data.fill_(math.log(tau))
        at[tau] = layer(x)
    assert torch.equal(at[1e6], at[LARGEST_TAU])
