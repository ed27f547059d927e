"""Ranks of attention: bounded by the width of the feature map, unless softmax or a causal mask frees them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.linear import attend_linear
from models.attention.scoring.synthesizer_scores import factorised_random_scores
from models.maps.rank import effective_rank, numerical_rank

N, D_K = 64, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def queries_and_keys() -> tuple[Tensor, Tensor]:
    """Two rows, three heads, (2, 3, N, D_K)."""
    return normal(2, 3, N, D_K), normal(2, 3, N, D_K, seed=1)


EVERY_VALUE = torch.eye(N, dtype=torch.float64).expand(2, 3, N, N)  # what is attended to with these values are the weights


# The two measures


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_product_through_few_numbers_has_their_rank(rank: int) -> None:
    matrix = normal(4, 20, rank) @ normal(4, rank, 30, seed=1)
    assert numerical_rank(matrix).tolist() == [rank] * 4
    assert (effective_rank(matrix) <= rank + 1e-9).all()
    assert numerical_rank(matrix.float(), rtol=1e-5).tolist() == [rank] * 4


def test_effective_rank_counts_equal_dimensions_and_discounts_small_ones() -> None:
    assert float(effective_rank(torch.eye(7))) == pytest.approx(7)
    assert float(effective_rank(torch.ones(7, 7))) == pytest.approx(1)
    halves = torch.diag(torch.tensor([3.0, 1.0]))
    assert float(effective_rank(halves)) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert float(effective_rank(1e-9 * halves)) == pytest.approx(float(effective_rank(halves)))
    nothing = torch.zeros(3, 4)
    assert (int(numerical_rank(nothing)), float(effective_rank(nothing))) == (0, 0.0)


# Statements on mechanisms


def test_linear_attention_has_the_rank_of_its_feature_map() -> None:
    """D_k for elu + 1, at any N; normalising the rows changes nothing about it."""
    q, k = queries_and_keys()
    assert numerical_rank(attend_linear(q, k, EVERY_VALUE)).unique().tolist() == [D_K]


def test_softmax_attention_has_full_rank() -> None:
    q, k = queries_and_keys()
    weights = attend(q, k, EVERY_VALUE, scale=D_K**-0.5)
    assert numerical_rank(weights).unique().tolist() == [N]
    assert (effective_rank(weights) > 2 * effective_rank(attend_linear(q, k, EVERY_VALUE))).all()


def test_a_causal_mask_gives_linear_attention_its_full_rank_back() -> None:
    q, k = queries_and_keys()
    masked = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    masked = masked / masked.sum(-1, keepdim=True)
    assert numerical_rank(masked).unique().tolist() == [N]
    assert (effective_rank(masked) > D_K).all()


def test_scores_of_a_factorised_random_synthesizer_have_rank_k_and_their_softmax_has_more() -> None:
    """The bound is one of the scores; exp is not a product through k numbers."""
    L = factorised_random_scores(normal(3, N, 4), normal(3, N, 4, seed=1))
    assert numerical_rank(L).tolist() == [4] * 3
    assert (numerical_rank(L.softmax(-1)) > 4).all()


def test_the_mean_of_all_values_has_rank_one() -> None:
    """What softmax becomes for keys that are all alike."""
    q, k = queries_and_keys()
    weights = attend(q, k[:, :, :1].expand_as(k), EVERY_VALUE, scale=1.0)
    assert numerical_rank(weights).unique().tolist() == [1]
    assert (effective_rank(weights) - 1).abs().max() <= 1e-6
