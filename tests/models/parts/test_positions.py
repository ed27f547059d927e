"""Positions: tables, rotations and biases."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from models.parts.positions import RelativeBias, Rotation, RotationTable, distance_buckets, positions_after_padding, rotate, sinusoids

EXACT = 1e-10  # float64


def test_sinusoids_alternate_and_follow_the_formula() -> None:
    table = sinusoids(50, 8)
    for t in (0, 1, 49):
        for i in range(4):
            angle = t / 10000 ** (2 * i / 8)
            assert table[t, 2 * i] == pytest.approx(math.sin(angle), abs=EXACT)
            assert table[t, 2 * i + 1] == pytest.approx(math.cos(angle), abs=EXACT)


def test_an_odd_width_drops_the_last_cosine() -> None:
    assert sinusoids(5, 7).shape == (5, 7)
    last = (torch.arange(5, dtype=torch.float64) * 10000 ** (-6 / 7)).sin()
    assert (sinusoids(5, 7)[:, 6] - last).abs().max() <= EXACT


def test_positions_skip_padding_wherever_it_stands() -> None:
    ids = torch.tensor([[5, 6, 1, 1], [1, 5, 1, 6], [1, 1, 1, 1]])
    assert positions_after_padding(ids, 1).tolist() == [[2, 3, 1, 1], [1, 2, 1, 3], [1, 1, 1, 1]]


def rotated_scores(shift: int) -> Tensor:
    q, k = torch.randn(2, 1, 1, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = RotationTable(40, 8, base=100.0, dtype=torch.float64)(torch.arange(6) + shift)
    return rotate(q, rotation) @ rotate(k, rotation).transpose(-1, -2)


def test_a_rotated_score_depends_on_the_distance_alone() -> None:
    assert (rotated_scores(shift=0) - rotated_scores(shift=30)).abs().max() <= EXACT


def test_interleaved_pairs_are_those_of_the_paper() -> None:
    """(x_2i, x_{2i+1}) turned by t 10000^(-2i/s); columns without an angle stay."""
    x = torch.randn(1, 1, 5, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate(x, RotationTable(5, 8, base=10_000.0, dtype=torch.float64)(torch.arange(5)), interleaved=True)
    for t in range(5):
        for i in range(4):
            angle, (a, b) = t * 10_000 ** (-2 * i / 8), x[0, 0, t, 2 * i : 2 * i + 2].tolist()
            assert turned[0, 0, t, 2 * i] == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=EXACT)
            assert turned[0, 0, t, 2 * i + 1] == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=EXACT)
    assert torch.equal(turned[..., 8:], x[..., 8:])


def test_rotation_is_that_of_the_paper_up_to_the_order_of_columns() -> None:
    """The paper turns columns (2i, 2i + 1), eq. 34; here i and i + D_k/2 are partners."""
    x = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation: Rotation = RotationTable(5, 8, base=10.0, dtype=torch.float64)(torch.arange(5))
    cos, sin = (angles.repeat_interleave(2, dim=-1) for angles in (rotation.cos, rotation.sin))
    other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    paper = x * cos + other * sin
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert (rotate(x[..., order], rotation) - paper[..., order]).abs().max() <= EXACT


def test_an_odd_head_cannot_rotate() -> None:
    with pytest.raises(ValueError, match="d_head=7 is odd"):
        RotationTable(5, 7, base=10.0)


def test_buckets_are_those_of_mpnet() -> None:
    """Rounding and all: at 16, 32 and 64 the logarithm is a whole number, or just below it."""
    distances = torch.arange(-600, 601)
    assert torch.equal(distance_buckets(distances, 32, 128), MPNetEncoder.relative_position_bucket(distances))


def test_causal_buckets_are_those_of_t5() -> None:
    """All 32 look back: 16 exact distances, then logarithmic ones, and the future shares bucket 0 with the token itself."""
    distances = torch.arange(-600, 601)
    ours = distance_buckets(distances, 32, 128, causal=True)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(ours, theirs)
    assert ours[distances > 0].unique().tolist() == [0]
    assert ours[(distances > -16) & (distances <= 0)].tolist() == list(reversed(range(16)))
    both = T5Attention._relative_position_bucket(distances, bidirectional=True, num_buckets=32, max_distance=128)
    assert torch.equal(distance_buckets(distances, 32, 128), both)


def test_relative_bias_looks_up_the_distance_of_each_pair() -> None:
    bias = RelativeBias(20, n_heads=2)
    torch.nn.init.normal_(bias.weight)
    values = bias(torch.arange(20))
    assert values.shape == (1, 2, 20, 20)
    buckets = distance_buckets(torch.tensor([-7, 12]), 32, 128)
    assert torch.equal(values[0, :, 9, 2], bias.weight[buckets[0]])
    assert torch.equal(values[0, :, 3, 15], bias.weight[buckets[1]])
    assert torch.equal(bias(torch.arange(5)), values[:, :, :5, :5])
