"""Kernel regression."""

import torch

from models.attention.scoring.nadaraya_watson import NadarayaWatsonAttention, attend_nadaraya_watson
from tests.cases import in_one_test
from tests.models.attention.scores import D_K, EXACT, B, H, by_loops, drawn, pairs, qkv

BANDWIDTHS = {
    "a number": 0.7,
    "a tensor of one": torch.tensor(0.7, dtype=torch.float64),
    "one a head": drawn(H, 1, seed=6).exp(),
    "one a dimension": drawn(D_K, seed=6).exp(),
    "one a dimension of each head": drawn(H, D_K, seed=6).exp(),
}


@in_one_test("h", BANDWIDTHS.values(), ids=BANDWIDTHS)
def test_computes_what_the_loops_compute(h: torch.Tensor | float) -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    of_head = torch.as_tensor(h, dtype=torch.float64).expand(H, D_K)
    expected = by_loops(lambda head, q, k: -0.5 * ((q - k) / of_head[head]).square().sum(), q, k, v, mask, bias)
    assert (attend_nadaraya_watson(q, k, v, h=h, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_a_query_far_from_every_key_takes_the_nearest() -> None:
    """Every kernel is 0 in floating point: exp(-½ 10⁸)."""
    k = torch.tensor([[0.0], [1.0]])[None, None]
    v = torch.tensor([[3.0], [5.0]])[None, None]
    assert torch.equal(attend_nadaraya_watson(torch.tensor([[1e4], [-1e4]])[None, None], k, v).flatten(), torch.tensor([5.0, 3.0]))


def test_half_precision_holds_the_squares_of_long_keys() -> None:
    q, k, v = (x.half() for x in qkv())
    o = attend_nadaraya_watson(300 * q, 300 * k, v, h=300.0)
    assert o.dtype == torch.float16
    assert (o - attend_nadaraya_watson(q.double(), k.double(), v.double())).abs().max() < 0.01


@in_one_test("bandwidth", [1e-3, 1.0, 50.0, 1e4])
@in_one_test("per_dimension", [False, True])
def test_a_layer_begins_with_the_bandwidth_given(bandwidth: float, per_dimension: bool) -> None:
    layer, x = NadarayaWatsonAttention(12, 3, bandwidth=bandwidth, per_dimension=per_dimension).double(), drawn(B, 5, 12, seed=1)
    assert layer.attend.rho.shape == (3, 4 if per_dimension else 1)
    q, k, v = (to(x).unflatten(-1, (3, -1)).transpose(1, 2) for to in (layer.to_q, layer.to_k, layer.to_v))
    o = attend_nadaraya_watson(q, k, v, h=bandwidth)
    assert (layer(x) - layer.to_out(o.transpose(1, 2).flatten(-2))).abs().max() < 1e-4  # rho is drawn in float32
