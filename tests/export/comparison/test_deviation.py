"""Why an exponent is another than the stated one, from figures that are made so."""

import pytest

from export.comparison import deviation
from export.comparison.plan import LENGTHS, ComparisonPlan
from export.comparison.results import Point, Result

PLAN = ComparisonPlan()
SOFTMAX = 4 * 128 * 128  # weights of the projections


def result(seconds, *, ended: str = "") -> Result:
    points = [Point(N=N, s=seconds(N), runs=3, peak_bytes=1000 * N) for N in LENGTHS]
    return Result(name="softmax", key="", linear_weights=SOFTMAX, points=points, ended=ended)


def test_as_stated() -> None:
    assert deviation.explanation(result(lambda N: 1e-9 * N**2), PLAN) == "as stated."


def test_projections_explain_a_smaller_one() -> None:
    why = deviation.explanation(result(lambda N: 1e-10 * (2 * N * N * 128 + SOFTMAX * N)), ComparisonPlan(d_model=128))
    assert why.startswith(("as stated", "the projections, which the statement leaves out, are 2% of the multiply-adds at N = 16,384"))


def test_less_than_projections_explain_is_told_with_the_last_doubling() -> None:
    why = deviation.explanation(result(lambda N: 1e-6 * N), PLAN)
    assert why.startswith("less than its pairs' share")
    assert why.endswith("the exponent of the last doubling is 1.00.")


def test_more_than_stated_is_told_by_the_price_of_a_multiply_add() -> None:
    why = deviation.explanation(result(lambda N: 1e-12 * N**2.5, ended="memory"), PLAN)
    assert why.startswith("a multiply-add takes 4.")
    assert "works on 15.6 MiB in the place of 1.0" in why
    assert why.endswith("Stopped: memory.")


def test_two_lengths_are_too_few() -> None:
    short = result(lambda N: 1.0).model_copy(update={"points": [Point(N=64, s=1, runs=1, peak_bytes=1)]})
    assert deviation.explanation(short, PLAN) == "too few lengths from N = 1,024 on for an exponent."


@pytest.mark.parametrize(("exponent", "shown"), [(None, ""), (1.996, "2.00")])
def test_exponents_are_shown_with_two_digits(exponent: float | None, shown: str) -> None:
    assert deviation.p(exponent) == shown
