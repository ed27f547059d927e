"""The largest so far is that of torch, carried from call to call, and its tables stay small."""

import torch

from models.attention.layers.running_max import CHUNK, GROUP, running_max
from tests.cases import in_one_test
from tests.largest_tensor import LargestTensor

BLOCK = CHUNK * GROUP  # tokens of a group of chunks
EDGES = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 7, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + CHUNK, 3 * BLOCK + CHUNK + 1]


def draw(B: int, N: int) -> torch.Tensor:
    return torch.randn(B, 2, N, 3, generator=torch.Generator().manual_seed(N), dtype=torch.float64) - 100  # below the state's zeros


@in_one_test("N", EDGES)
def test_it_is_torchs_in_one_call_and_in_pieces(N: int) -> None:
    x, nothing = draw(2, N), torch.zeros(2, 2, 3, dtype=torch.float64)
    m, decay, last = running_max(x, nothing, nothing > 0)
    expected = x.cummax(2).values
    assert torch.equal(m, expected)
    assert torch.equal(last, expected[:, :, -1])
    assert torch.equal(decay[:, :, 1:], expected[:, :, :-1] - expected[:, :, 1:])
    assert not decay[:, :, 0].any()
    pieces, seen = [], nothing > 0
    for piece in x.split(max(1, N // 3), dim=2):
        pieces.append(running_max(piece, nothing, seen))
        nothing, seen = pieces[-1].last, torch.ones_like(seen)
    assert torch.equal(torch.cat([piece.m for piece in pieces], dim=2), m)
    assert torch.equal(torch.cat([piece.decay for piece in pieces], dim=2), decay)


@in_one_test("N", EDGES)
def test_a_falling_sequence_keeps_its_first_number_and_a_rising_one_each(N: int) -> None:
    """At every edge of a chunk and of a group; a random sequence has its largest numbers early, and hides what is missed later."""
    nothing = torch.zeros(1, 1, 1)
    falling = -torch.arange(N, dtype=torch.float32)[None, None, :, None]
    assert torch.equal(running_max(falling, nothing, nothing > 0).m, torch.zeros_like(falling))
    assert torch.equal(running_max(-falling, nothing, nothing > 0).m, -falling)


def test_no_table_of_pairs_is_larger_than_the_tokens() -> None:
    """Up to 16,384 tokens. The causal efficient layer once had a table of all pairs of chunks, with 16 times as many numbers."""
    x, nothing = torch.zeros(1, 1, 16_384, 4), torch.zeros(1, 1, 4)
    with LargestTensor() as largest:
        running_max(x, nothing, nothing > 0)
    assert largest.size_bytes <= x.nbytes
