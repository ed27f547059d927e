"""BigBird against its definition as a dense mask, and the random blocks of its layer."""

import pytest
import torch
from torch import Tensor

from models.attention.sparse.bigbird import BigBirdAttention, attend_bigbird, random_blocks
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, check

BLOCK = 3
LENGTHS = (1, 3, 6, 7, 9, 10, 23, 24, 25)


def blocks_seen(table: Tensor, n: int) -> Tensor:
    """(H, n - 2, r) -> (H, n, n) bool: which block of queries sees which of keys."""
    seen = torch.zeros(table.shape[0], n, n, dtype=torch.bool)
    seen[:, [0, n - 1]] = True
    seen[:, :, [0, n - 1]] = True
    for h in range(table.shape[0]):
        for i in range(1, n - 1):
            for j in (i - 1, i, i + 1, *table[h, i - 1].tolist()):
                if 0 <= j < n:
                    seen[h, i, j] = True
    return seen


def pattern(table: Tensor, N: int) -> Tensor:
    """(H, N, N) bool."""
    seen = blocks_seen(table, -(-N // BLOCK))
    return seen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :N, :N]


def some_table(N: int, r: int = 3) -> Tensor:
    """Blocks that repeat, that are seen anyway, and numbers that are no blocks."""
    n = -(-N // BLOCK)
    return torch.randint(-1, n + 1, (2, max(n - 2, 0), r), generator=torch.Generator().manual_seed(N))


@in_one_test("r", [0, 1, 4])
@in_one_test("N", LENGTHS)
def test_is_a_dense_mask_in_which_every_key_counts_once(N: int, r: int) -> None:
    table = some_table(N, r)

    def fast(q, k, v, key_mask):
        return attend_bigbird(q, k, v, table, block=BLOCK, key_mask=key_mask)

    check(fast, pattern(table, N), N)


@in_one_test("n", [8, 9, 20])
@in_one_test("r", [1, 2, 3])
def test_random_blocks_are_legal_and_different(n: int, r: int) -> None:
    draws = torch.randint(2**31, (4, 30, r), generator=torch.Generator().manual_seed(0))
    table = random_blocks(draws[:, :n], torch.tensor([[[n]]]))[0]
    assert table.shape == (4, n, r)
    for h in range(4):
        for i in range(1, n - 1):
            drawn = set(table[h, i].tolist())
            assert len(drawn) == r
            assert drawn <= set(range(1, n - 1)) - {i - 1, i, i + 1}


def test_every_legal_block_is_drawn_equally_often() -> None:
    """Of 4000 heads: the counts of a fair draw of 2 from 5 are 1600, and stay within 5 standard deviations of 31."""
    draws = torch.randint(2**31, (4000, 10, 2), generator=torch.Generator().manual_seed(0))
    table = random_blocks(draws, torch.tensor([[[10]]]))[0, :, 4]
    counts = torch.bincount(table.flatten(), minlength=10)
    assert counts.nonzero().flatten().tolist() == [1, 2, 6, 7, 8]
    assert (counts[counts > 0] - 1600).abs().max() < 5 * 31


def layer_of(**options: int) -> BigBirdAttention:
    torch.manual_seed(0)
    return BigBirdAttention(8, 2, block=BLOCK, n_random=2, **options).double()


def test_training_and_use_are_the_same_and_so_are_two_layers_of_a_seed() -> None:
    x = torch.randn(1, 60, 8, dtype=torch.float64)
    layer = layer_of()
    assert torch.equal(layer.train()(x), layer.eval()(x))
    assert torch.equal(layer.draws, layer_of().draws)
    assert not torch.equal(layer.draws, layer_of(seed=1).draws)
    assert "draws" in layer.state_dict()


@in_one_test("N", [5, 27, 28, 43])
def test_padding_and_longer_neighbours_change_nothing_in_a_long_batch_too(N: int) -> None:
    """Neither the last block nor the random blocks are those of the batch."""
    layer, x = layer_of(), torch.randn(2, 61, 8, dtype=torch.float64)
    y = layer(x, torch.arange(61) < torch.tensor([[N], [61]]))
    assert (y[:1, :N] - layer(x[:1, :N])).abs().max() <= EXACT
    assert (y[1:] - layer(x[1:])).abs().max() <= EXACT


def test_too_long_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="N=13 tokens, but the layer has n_positions=12"):
        layer_of(n_positions=12)(torch.randn(1, 13, 8, dtype=torch.float64))
