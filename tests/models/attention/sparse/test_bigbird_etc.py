"""BigBird with global tokens in front, against one mask of all pairs."""

import pytest
import torch
from torch import Tensor

from models.attention.sparse.bigbird_etc import attend_bigbird_etc
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import LENGTHS, check, heads

b, H = 2, 2


def table(N: int, r: int) -> Tensor:
    """Of n blocks, with numbers that are no block and numbers of neighbours among them."""
    n = -(-N // b)
    return torch.randint(-1, n + 1, (H, n, r), generator=torch.Generator().manual_seed(N))


def pattern(N: int, g: int, random: Tensor) -> Tensor:
    """(H, N, N) bool."""
    seen = torch.zeros(H, N, N, dtype=torch.bool)
    for h in range(H):
        for i in range(N):
            for j in range(N):
                block_i, block_j = (i - g) // b, (j - g) // b
                near = abs(block_i - block_j) <= 1 or block_j in random[h, max(block_i, 0)].tolist()
                seen[h, i, j] = i < g or j < g or near
    return seen


@in_one_test("r", [0, 2])
@in_one_test("g", [0, 1, 3])
@in_one_test("N", LENGTHS)
def test_is_softmax_over_the_pattern(N: int, g: int, r: int) -> None:
    random = table(N, r)
    check(lambda *qkv, **mask: attend_bigbird_etc(*qkv, random, n_global=g, block=b, **mask), pattern(g + N, g, random), g + N)


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="table has random blocks for 4 blocks, and 5 tokens are 3 blocks of 2"):
        attend_bigbird_etc(*heads(6), table(7, 1), n_global=1, block=b)
