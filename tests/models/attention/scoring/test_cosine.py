"""Cosines as scores."""

import math

import pytest
import torch
import torch.nn.functional as F

from models.attention.scoring.cosine import LARGEST_TAU, CosineAttention, attend_cosine
from tests.models.attention.scores import EXACT, H, by_loops, drawn, pairs, qkv, weights_of


def test_computes_what_the_loops_compute() -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    tau = torch.tensor([0.5, 3.0, 20.0], dtype=torch.float64)
    expected = by_loops(lambda h, q, k: tau[h] * F.cosine_similarity(q, k, dim=0), q, k, v, mask, bias)
    assert (attend_cosine(q, k, v, tau=tau, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_tau_is_a_number_or_one_a_head() -> None:
    q, k, v = qkv()
    expected = attend_cosine(q, k, v, tau=5.0)
    for tau in (torch.tensor(5.0), torch.full((H,), 5.0)):
        assert torch.equal(attend_cosine(q, k, v, tau=tau.double()), expected)


def test_lengths_do_not_count() -> None:
    q, k, v = qkv()
    longer_q, longer_k = (x * drawn(*x.shape[:-1], 1, seed=6).exp() for x in (q, k))
    assert (attend_cosine(longer_q, longer_k, v, tau=10.0) - attend_cosine(q, k, v, tau=10.0)).abs().max() <= EXACT


def test_weights_lie_between_bounds() -> None:
    """Scores in [-tau, tau]: no key has more than e^(2 tau) times the weight of another."""
    q, k, _ = qkv()
    weights = weights_of(attend_cosine, 1e3 * q, 1e3 * k, tau=1.0)
    assert (weights.amax(-1) / weights.amin(-1)).max() <= math.exp(2) + EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
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


def test_gradients() -> None:
    (q, k, v), (mask, bias) = (tuple(x[..., :3, :2].contiguous() for x in qkv()), (x[..., :3, :3] for x in pairs()))
    tau = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, tau)]
    assert torch.autograd.gradcheck(lambda q, k, v, tau: attend_cosine(q, k, v, tau=tau, mask=mask, bias=bias), inputs)


def test_a_head_begins_at_ten_and_is_held_at_a_hundred() -> None:
    layer, x = CosineAttention(12, H).double(), drawn(2, 5, 12, seed=1)
    assert (layer.attend.log_tau.exp() - 10).abs().max() <= 1e-5
    at = {}
    for tau in (LARGEST_TAU, 1e6):
        layer.attend.log_tau.data.fill_(math.log(tau))
        at[tau] = layer(x)
    assert torch.equal(at[1e6], at[LARGEST_TAU])


@pytest.mark.parametrize("tau", [0.0, -1.0, 101.0, math.nan])
def test_a_tau_out_of_reach_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match=f"tau={tau} must be above 0 and at most 100"):
        CosineAttention(12, 3, tau=tau)
