"""Positions: tables, rotations and buckets of distances."""

import math

import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from models.parts.positions import RotationTable, distance_buckets, positions_after_padding, rotate, sinusoids

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
