"""The effective rank of a matrix."""

import math

import pytest
import torch
from torch import Tensor

from models.maps.rank import effective_rank
from tests.cases import in_one_test


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@in_one_test("rank", [1, 3, 8])
def test_a_product_through_few_numbers_has_their_rank(rank: int) -> None:
    matrix = normal(4, 20, rank) @ normal(4, rank, 30, seed=1)
    assert (effective_rank(matrix) <= rank + 1e-9).all()


def test_effective_rank_counts_equal_dimensions_and_discounts_small_ones() -> None:
    assert float(effective_rank(torch.eye(7))) == pytest.approx(7)
    assert float(effective_rank(torch.ones(7, 7))) == pytest.approx(1)
    halves = torch.diag(torch.tensor([3.0, 1.0]))
    assert float(effective_rank(halves)) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert float(effective_rank(1e-9 * halves)) == pytest.approx(float(effective_rank(halves)))
    nothing = torch.zeros(3, 4)
    assert float(effective_rank(nothing)) == 0.0
