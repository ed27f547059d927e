"""Disentangled attention is its equations, in loops over pairs of tokens."""

import math

import pytest
import torch
from torch import Tensor

from models.attention.scoring.disentangled import DisentangledAttention, attend_disentangled, distance_rows
from tests.cases import in_one_test
from tests.models.attention.scores import D_K, EXACT, B, H, by_loops, drawn, pairs, qkv

N = 7


def vectors(r: Tensor, order: int) -> Tensor:
    """Rows r (H, 2 N + 1, D_k) of the distances -N .. N, as the function takes them."""
    distances = torch.arange(N - 1, -N - 1, -1) if order < 0 else torch.arange(1 - N, N + 1)
    return r[:, distances + N]


@in_one_test("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
def test_it_is_the_sum_of_its_terms(terms: tuple[str, ...]) -> None:
    """With a bias, and a query that sees no key."""
    q, k, v = qkv(N, N)
    mask, bias = pairs(N, N)
    r_k, r_q = drawn(H, 2 * N + 1, D_K, seed=8), drawn(H, 2 * N + 1, D_K, seed=9)
    scale = math.sqrt(D_K * (1 + len(terms)))
    added = torch.zeros(B, H, N, N).double()
    for i in range(N):
        for j in range(N):
            if "c2p" in terms:
                added[:, :, i, j] += torch.einsum("bhd,hd->bh", q[:, :, i], r_k[:, i - j + N]) / scale
            if "p2c" in terms:
                added[:, :, i, j] += torch.einsum("bhd,hd->bh", k[:, :, j], r_q[:, i - j + N]) / scale
    given = {"r_k": vectors(r_k, -1) if "c2p" in terms else None, "r_q": vectors(r_q, 1) if "p2c" in terms else None}
    o = attend_disentangled(q, k, v, **given, mask=mask, bias=bias)
    for b in range(B):
        each = slice(b, b + 1)
        wanted = by_loops(lambda h, q, k: q @ k / scale, q[each], k[each], v[each], mask[each], bias + added[each])
        assert (o[each] - wanted).abs().max() <= EXACT


def test_far_distances_share_rows() -> None:
    """Of span 4 with buckets up to 9: -2 .. 2 have a row each, -3 .. -8 share one, and what is further has the last."""
    distances = torch.arange(-12, 13)
    assert distance_rows(distances, 4).tolist() == [max(min(int(d), 3), -4) + 4 for d in distances]
    assert distance_rows(distances, 4, 9).tolist() == [0] * 4 + [1] * 6 + [2, 3, 4, 5, 6] + [7] * 10


def test_more_tokens_than_positions_and_rotations_are_refused() -> None:
    layer = DisentangledAttention(8, 2, n_positions=4, span=4, max_distance=9)
    assert layer(torch.zeros(1, 4, 8)).shape == (1, 4, 8)
    with pytest.raises(ValueError, match="N=5 tokens, but the layer has rows for n_positions=4; cut the input"):
        layer(torch.zeros(1, 5, 8))
