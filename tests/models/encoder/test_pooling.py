"""From token vectors to one vector, against sums written out."""

import pytest
import torch

from models.encoder.pooling import POOLINGS, unit_length
from tests.cases import in_one_test

X = torch.arange(24, dtype=torch.float64).reshape(2, 4, 3).sin()
RIGHT = torch.tensor([[True, True, True, False], [True, False, False, False]])

every_pooling = in_one_test("name", POOLINGS)


@in_one_test(
    ("name", "expected"),
    [
        ("cls", X[0, 0]),
        ("last", X[0, 2]),
        ("mean", (X[0, 0] + X[0, 1] + X[0, 2]) / 3),
        ("mean_sqrt_len", (X[0, 0] + X[0, 1] + X[0, 2]) / 3**0.5),
        ("max", torch.maximum(torch.maximum(X[0, 0], X[0, 1]), X[0, 2])),
    ],
)
def test_of_three_tokens_and_a_padding(name: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(POOLINGS[name](X, RIGHT)[0], expected)
    torch.testing.assert_close(POOLINGS[name](X, RIGHT)[1], X[1, 0])  # one token is its own pool


@every_pooling
def test_padding_is_not_seen(name: str) -> None:
    other = torch.where(RIGHT.unsqueeze(-1), X, 1e6)
    assert torch.equal(POOLINGS[name](other, RIGHT), POOLINGS[name](X, RIGHT))


@every_pooling
def test_a_row_without_tokens_is_zero(name: str) -> None:
    pooled = POOLINGS[name](X, torch.tensor([[False] * 4, [True] * 4]))
    assert torch.equal(pooled[0], torch.zeros(3))
    assert torch.equal(unit_length(pooled)[0], torch.zeros(3))


@every_pooling
def test_half_precision_keeps_its_dtype_and_does_not_overflow(name: str) -> None:
    """1000 tokens of 100: the sum, 100,000, is beyond float16; the mean is not."""
    pooled = POOLINGS[name](torch.full((1, 1000, 2), 100.0).half(), torch.ones(1, 1000, dtype=torch.bool))
    assert pooled.dtype == torch.float16
    assert torch.isfinite(pooled).all()


def test_last_finds_the_last_token_on_either_side() -> None:
    left = torch.tensor([[False, True, True, True], [False, False, True, False]])
    assert torch.equal(POOLINGS["last"](X, left), torch.stack([X[0, 3], X[1, 2]]))


def test_unit_length() -> None:
    torch.testing.assert_close(unit_length(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))
    assert unit_length(torch.full((1, 400), 300.0).half()).norm() == pytest.approx(1, abs=1e-2)  # 300² · 400 is beyond float16
