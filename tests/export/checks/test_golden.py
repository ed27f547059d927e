"""The figures that say how close a quantised graph is to torch."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from export.checks.golden import spearman


def test_a_rank_correlation_knows_the_order_alone() -> None:
    want = np.array([0.1, -2.0, 5.0, 0.3, 0.2])
    assert spearman(np.exp(want), want) == pytest.approx(1)
    assert spearman(-want, want) == pytest.approx(-1)
    got = want + np.random.default_rng(0).normal(size=5)
    assert spearman(got, want) == pytest.approx(spearmanr(got, want).statistic)


def test_equal_numbers_share_a_rank() -> None:
    got, want = np.array([1.0, 1.0, 2.0, 3.0, 3.0]), np.arange(5.0)
    assert spearman(got, want) == pytest.approx(spearmanr(got, want).statistic)
    assert spearman(np.zeros(5), want) == 0
    assert spearman(want[:1], want[:1]) == 0
