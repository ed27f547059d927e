"""LSH attention is what its definition says, written as loops; and it is full attention wherever its buckets hide nothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.scaled_dot_product import masked_softmax
from models.attention.sparse.causal_lsh import attend_lsh_to_cache
from models.attention.sparse.lsh import LSHAttention, attend_lsh
from models.attention.sparse.lsh_buckets import angular_buckets, draw_rotations, hyperplane_buckets
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

B, H, D_K = 2, 2, 4
LAST_RESORT = -1e5


def heads(N: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """qk and v."""
    return drawn(B, H, N, D_K, seed=seed), drawn(B, H, N, 3, seed=seed + 1)


def random_buckets(N: int, *, n_rounds: int = 3, n_buckets: int = 4, seed: int = 7) -> Tensor:
    return torch.randint(n_buckets, (B, H, n_rounds, N), generator=torch.Generator().manual_seed(seed))


def lengths_mask(*lengths: int, N: int) -> Tensor:
    return torch.arange(N) < torch.tensor(lengths)[:, None]


def chunks_of(buckets: list[int], real: list[bool], chunk: int) -> list[list[int]]:
    """The real tokens of one round, sorted by bucket and cut."""
    order = sorted((i for i in range(len(real)) if real[i]), key=lambda i: (buckets[i], i))
    return [order[first : first + chunk] for first in range(0, len(order), chunk)]


def seen_in_rounds(
    rounds: list[list[int]], real: list[bool], *, chunk: int, before: int, after: int, rule: str, causal: bool
) -> list[dict[int, list[int]]]:
    """In each round of one head: which tokens each token sees; by the rule of chunks, a token of two rounds' chunks counts twice."""
    cut = [chunks_of(buckets, real, chunk) for buckets in rounds]
    n = len(cut[0])
    across = rule == "chunk" and n > 1
    found: list[dict[int, list[int]]] = []
    for r, buckets in enumerate(rounds):
        circle = [members for each in cut for members in each] if across else cut[r]
        begin = r * n if across else 0
        seen: dict[int, list[int]] = {}
        for c, members in enumerate(cut[r]):
            numbers = {(begin + c + offset) % len(circle) for offset in range(-before, after + 1)}
            around = [j for number in numbers for j in circle[number]]
            for i in members:
                seen[i] = [j for j in around if (rule == "chunk" or buckets[i] == buckets[j]) and (j <= i or not causal)]
        found.append(seen)
    return found


def by_loops(qk: Tensor, v: Tensor, buckets: Tensor, key_mask: Tensor, *, scale: float = 1.0, **how: object) -> Tensor:
    o = torch.zeros_like(v)
    for b in range(B):
        for h in range(H):
            real = key_mask[b].tolist()
            rounds = seen_in_rounds(buckets[b, h].tolist(), real, **how)  # type: ignore[arg-type]
            for i in (i for i in range(len(real)) if real[i]):
                logits, values = [], []
                for seen in rounds:
                    for j in seen[i]:
                        times = sum(j in other[i] for other in rounds) if how["rule"] == "paper" else 1
                        score = LAST_RESORT if i == j else scale * float(qk[b, h, i] @ qk[b, h, j] / qk[b, h, j].norm())
                        logits.append(score - math.log(times))
                        values.append(v[b, h, j])
                o[b, h, i] = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0) @ torch.stack(values)
    return o


def full(qk: Tensor, v: Tensor, allowed: Tensor, *, scale: float = 1.0) -> Tensor:
    """Softmax over all keys of length 1 that are allowed, a token itself as its last resort."""
    scores = scale * (qk @ F.normalize(qk, dim=-1).mT)
    scores = scores.masked_fill(torch.eye(qk.shape[2], dtype=torch.bool), LAST_RESORT)
    return masked_softmax(scores, allowed) @ v


# The definition


@in_one_test("rule", ["paper", "chunk"])
@in_one_test("causal", [False, True])
@in_one_test(("before", "after"), [(1, 0), (1, 1), (0, 0), (2, 1)])
@in_one_test("N", [1, 8, 9, 23])
def test_computes_what_the_loops_compute(rule: str, causal: bool, before: int, after: int, N: int) -> None:
    (qk, v), buckets, mask = heads(N), random_buckets(N), lengths_mask(N, (N + 1) // 2, N=N)
    how = {"rule": rule, "causal": causal, "chunk": 4, "before": before, "after": after}
    ours = attend_lsh(qk, v, buckets, key_mask=mask, scale=0.7, **how)
    assert (ours - by_loops(qk, v, buckets, mask, scale=0.7, **how)).abs().max() <= EXACT


def test_a_mask_may_have_holes() -> None:
    (qk, v), buckets = heads(19), random_buckets(19)
    mask = drawn(B, 19) > -0.3
    how = {"rule": "paper", "causal": False, "chunk": 4, "before": 1, "after": 0}
    ours = attend_lsh(qk, v, buckets, key_mask=mask, **how)
    assert (ours - by_loops(qk, v, buckets, mask, **how)).abs().max() <= EXACT
    assert not ours.transpose(1, 2)[~mask].any()


# Where it is full attention


def test_the_layer_is_full_attention_up_to_a_chunk() -> None:
    torch.manual_seed(0)
    layer, x = LSHAttention(8, 2, chunk=6, n_buckets=8).double(), drawn(2, 9, 8)
    mask = lengths_mask(9, 6, N=9)
    qk, v = (to(x).unflatten(-1, (2, 4)).transpose(1, 2) for to in (layer.to_q, layer.to_v))
    expected = layer.to_out(full(qk, v, mask[:, None, None, :]).transpose(1, 2).flatten(-2))
    difference = (layer(x, mask) - expected)[:, :6].abs().amax((1, 2))
    assert difference[1] <= EXACT
    assert difference[0] > 1e-3


# Order, padding, numbers


@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_autocast_keeps_the_last_resort_above_what_is_hidden(dtype: torch.dtype) -> None:
    """float16 ends at 65,504, and the least number of float32 is none of bfloat16."""
    (qk, v), buckets = (x.float() for x in heads(9)), torch.arange(9).expand(B, H, 2, 9)  # every token is alone
    mask = lengths_mask(9, 0, N=9)
    with torch.autocast("cpu", dtype=dtype):
        o = attend_lsh(qk, v, buckets, key_mask=mask, chunk=4)
        empty = {"qk": qk[:, :, :0], "v": v[:, :, :0], "buckets": qk.new_zeros(B, H, 0, 2)}
        causal, _ = attend_lsh_to_cache(qk, v, buckets.mT.float(), empty)
    assert (o[0] - v[0]).abs().max() <= 0.02
    assert not o[1].any()
    assert (causal - v).abs().max() <= 0.02


# Hashing


def test_an_angular_bucket_is_the_nearest_direction() -> None:
    x, rotations = drawn(B, H, 11, D_K), draw_rotations(H, 3, D_K, 6, seed=0)
    buckets = angular_buckets(x, rotations)
    assert buckets.shape == (B, H, 3, 11)
    for r in range(3):
        for h in range(H):
            directions = torch.cat([rotations[h, r].double().T, -rotations[h, r].double().T])  # (n_b, D_k)
            expected = [max(range(6), key=lambda n, x=x[0, h, i]: float(directions[n] @ x)) for i in range(11)]
            assert buckets[0, h, r].tolist() == expected


def test_factors_of_a_bucket_are_hashes_of_their_own() -> None:
    x, rotations = drawn(B, H, 40, D_K), draw_rotations(H, 3, D_K, (4, 6, 2), seed=0)
    assert rotations.shape == (H, 3, D_K, 6)
    first, second, third = (angular_buckets(x, part) for part in rotations.split([2, 3, 1], dim=-1))
    assert torch.equal(angular_buckets(x, rotations, (4, 6, 2)), first + 4 * second + 24 * third)


def test_hyperplane_buckets_are_bits() -> None:
    x, planes = drawn(B, H, 9, D_K), drawn(H, 2, D_K, 3, seed=3)
    bits = (torch.einsum("bhnd,hrdc->bhrnc", x, planes) > 0).long()
    assert torch.equal(hyperplane_buckets(x, planes), bits[..., 0] + 2 * bits[..., 1] + 4 * bits[..., 2])


# The causal layer


def test_the_cache_gives_what_the_rounds_give() -> None:
    N = 20
    (qk, v), buckets = heads(N), random_buckets(N)
    empty = {"qk": qk[:, :, :0], "v": v[:, :, :0], "buckets": qk.new_zeros(B, H, 0, 3)}
    o, _ = attend_lsh_to_cache(qk, v, buckets.mT.double(), empty)
    assert (o - attend_lsh(qk, v, buckets, chunk=N, causal=True)).abs().max() <= EXACT


# What is refused


def test_rotations_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"n_buckets=\(4, 4\) needs rotations with 4 columns, not 2"):
        angular_buckets(drawn(1, 1, 2, D_K), draw_rotations(1, 1, D_K, 4, seed=0), (4, 4))
