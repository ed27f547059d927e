"""The largest so far is that of torch, carried from call to call, and padding leaves it."""

import pytest
import torch

from models.attention.layers.running_max import CHUNK, running_max


def draw(B: int, N: int) -> torch.Tensor:
    return torch.randn(B, 2, N, 3, generator=torch.Generator().manual_seed(N), dtype=torch.float64) - 100  # below the state's zeros


@pytest.mark.parametrize("N", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 7])
def test_it_is_torchs_in_one_call_and_in_pieces(N: int) -> None:
    x, nothing = draw(2, N), torch.zeros(2, 2, 3, dtype=torch.float64)
    m, decay, last = running_max(x, None, nothing, nothing > 0)
    expected = x.cummax(2).values
    assert torch.equal(m, expected)
    assert torch.equal(last, expected[:, :, -1])
    assert torch.equal(decay[:, :, 1:], expected[:, :, :-1] - expected[:, :, 1:])
    assert not decay[:, :, 0].any()
    pieces, seen = [], nothing > 0
    for piece in x.split(max(1, N // 3), dim=2):
        pieces.append(running_max(piece, None, nothing, seen))
        nothing, seen = pieces[-1].last, torch.ones_like(seen)
    assert torch.equal(torch.cat([piece.m for piece in pieces], dim=2), m)
    assert torch.equal(torch.cat([piece.decay for piece in pieces], dim=2), decay)


def test_padding_is_not_seen_and_a_row_of_padding_keeps_its_state() -> None:
    x, before = draw(3, 40), torch.full((3, 2, 3), 7.0, dtype=torch.float64)
    mask = torch.arange(40) < torch.tensor([40, 9, 0])[:, None]
    x = torch.where(mask[:, None, :, None], x, 1e300)
    _, decay, last = running_max(x, mask, before, torch.zeros_like(before, dtype=torch.bool))
    assert torch.equal(last[1], x[1, :, :9].amax(1))
    assert torch.equal(last[2], before[2])
    assert not decay[1, :, 9:].any()
    assert not decay[2].any()
