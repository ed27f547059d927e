"""Kernel regression."""

import math

import pytest
import torch

from models.attention.layers.scaled_dot_product import attend
from models.attention.scoring.nadaraya_watson import NadarayaWatsonAttention, attend_nadaraya_watson
from tests.models.attention.scores import D_K, EXACT, B, H, by_loops, drawn, pairs, qkv

BANDWIDTHS = {
    "a number": 0.7,
    "a tensor of one": torch.tensor(0.7, dtype=torch.float64),
    "one a head": drawn(H, 1, seed=6).exp(),
    "one a dimension": drawn(D_K, seed=6).exp(),
    "one a dimension of each head": drawn(H, D_K, seed=6).exp(),
}


@pytest.mark.parametrize("h", BANDWIDTHS.values(), ids=BANDWIDTHS)
def test_computes_what_the_loops_compute(h: torch.Tensor | float) -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    of_head = torch.as_tensor(h, dtype=torch.float64).expand(H, D_K)
    expected = by_loops(lambda head, q, k: -0.5 * ((q - k) / of_head[head]).square().sum(), q, k, v, mask, bias)
    assert (attend_nadaraya_watson(q, k, v, h=h, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_a_narrow_kernel_takes_the_nearest_value() -> None:
    q, k, v = qkv()
    nearest = torch.cdist(q, k).argmin(-1)  # (B, H, N_q)
    expected = v.gather(2, nearest.unsqueeze(-1).expand(-1, -1, -1, v.shape[-1]))
    assert (attend_nadaraya_watson(q, k, v, h=1e-3) - expected).abs().max() <= EXACT


def test_a_wide_kernel_takes_the_mean() -> None:
    q, k, v = qkv()
    assert (attend_nadaraya_watson(q, k, v, h=1e7) - v.mean(2, keepdim=True)).abs().max() <= EXACT


def test_keys_of_one_length_make_it_dot_product_attention() -> None:
    q, k, v = qkv()
    k = 3 * k / k.norm(dim=-1, keepdim=True)
    h = 0.8
    assert (attend_nadaraya_watson(q, k, v, h=h) - attend(q, k, v, scale=h**-2)).abs().max() <= EXACT


def test_moving_queries_and_keys_together_changes_nothing() -> None:
    q, k, v = qkv()
    c = drawn(D_K, seed=7)
    assert (attend_nadaraya_watson(q + c, k + c, v) - attend_nadaraya_watson(q, k, v)).abs().max() <= EXACT


def test_a_query_far_from_every_key_takes_the_nearest() -> None:
    """Every kernel is 0 in floating point: exp(-½ 10⁸)."""
    k = torch.tensor([[0.0], [1.0]])[None, None]
    v = torch.tensor([[3.0], [5.0]])[None, None]
    assert torch.equal(attend_nadaraya_watson(torch.tensor([[1e4], [-1e4]])[None, None], k, v).flatten(), torch.tensor([5.0, 3.0]))


def test_it_regresses() -> None:
    """The function sin from 200 points of it, within 1 % in the middle of the interval."""
    x = torch.linspace(0, math.pi, 200, dtype=torch.float64)[None, None, :, None]
    at = torch.linspace(0.5, 2.5, 9, dtype=torch.float64)[None, None, :, None]
    assert (attend_nadaraya_watson(at, x, x.sin(), h=0.05) - at.sin()).abs().max() < 0.01


def test_half_precision_holds_the_squares_of_long_keys() -> None:
    q, k, v = (x.half() for x in qkv())
    o = attend_nadaraya_watson(300 * q, 300 * k, v, h=300.0)
    assert o.dtype == torch.float16
    assert (o - attend_nadaraya_watson(q.double(), k.double(), v.double())).abs().max() < 0.01


def test_gradients() -> None:
    q, k, v = (x[..., :3, :2].clone().requires_grad_() for x in qkv())
    mask, bias = (x[..., :3, :3] for x in pairs())
    h = torch.tensor([[0.5, 1.0], [1.0, 2.0], [3.0, 0.7]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v, h: attend_nadaraya_watson(q, k, v, h=h, mask=mask, bias=bias), (q, k, v, h))


@pytest.mark.parametrize("bandwidth", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("per_dimension", [False, True])
def test_a_layer_begins_with_the_bandwidth_given(bandwidth: float, per_dimension: bool) -> None:
    layer, x = NadarayaWatsonAttention(12, 3, bandwidth=bandwidth, per_dimension=per_dimension).double(), drawn(B, 5, 12, seed=1)
    assert layer.attend.rho.shape == (3, 4 if per_dimension else 1)
    q, k, v = (to(x).unflatten(-1, (3, -1)).transpose(1, 2) for to in (layer.to_q, layer.to_k, layer.to_v))
    o = attend_nadaraya_watson(q, k, v, h=bandwidth)
    assert (layer(x) - layer.to_out(o.transpose(1, 2).flatten(-2))).abs().max() < 1e-4  # rho is drawn in float32


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan])
def test_a_kernel_without_width_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=f"bandwidth={bandwidth} must be above 1e-06"):
        NadarayaWatsonAttention(12, 3, bandwidth=bandwidth)
