"""Exponents of known curves, and lengths that are not tried."""

import pytest

from export.comparison import growth
from export.comparison.plan import ComparisonPlan, GiB
from export.comparison.results import Point
from export.errors import ExportError
from tests.cases import in_one_test

LENGTHS = (64, 1024, 2048, 4096)


@in_one_test("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_the_power(power: float) -> None:
    assert growth.exponent(LENGTHS, [3e-6 * N**power for N in LENGTHS]) == pytest.approx(power)


def test_short_lengths_do_not_count() -> None:
    """What a run costs at least is not growth."""
    assert growth.exponent(LENGTHS, [1e9, 1024.0, 2048.0, 4096.0]) == pytest.approx(1)


def test_there_is_no_exponent_of_two_lengths_or_of_nothing() -> None:
    assert growth.exponent(LENGTHS[:3], [1.0, 2.0, 3.0]) is None
    assert growth.exponent(LENGTHS, [1.0, 0.0, 2.0, 3.0]) is None


def test_a_stated_cost_has_the_exponent_of_its_formula() -> None:
    assert growth.stated_exponent(lambda N: 7.0 * N * N, LENGTHS) == pytest.approx(2)
    between = growth.stated_exponent(lambda N: N * (96 + N / 32), LENGTHS)
    assert between is not None
    assert 1.2 < between < 1.8


def point(N: int, *, s: float = 0.01, MiB: float = 1) -> Point:
    return Point(N=N, s=s, runs=3, peak_bytes=int(MiB * 2**20))


def test_a_length_that_would_take_too_much_memory_is_left_out_with_the_reason() -> None:
    plan = ComparisonPlan(memory_bytes=GiB)
    quadratic = [point(1024, MiB=100), point(2048, MiB=400)]
    assert growth.too_much(quadratic, 4096, plan) == "memory at N=4,096 would take some 1.56 GiB, and 1 GiB is the limit"
    assert growth.too_much([point(1024, MiB=100), point(2048, MiB=200)], 4096, plan) is None


def test_a_length_that_would_take_too_long_is_left_out_with_the_reason() -> None:
    reason = growth.too_much([point(1024, s=10), point(2048, s=40)], 4096, ComparisonPlan(longest_run_s=60))
    assert reason == "a run at N=4,096 would take some 160 s, and 60 s is the limit"


def test_the_first_two_lengths_are_always_tried() -> None:
    assert growth.too_much([], 64, ComparisonPlan(memory_bytes=1)) is None
    assert growth.too_much([point(64)], 128, ComparisonPlan(memory_bytes=1)) is None


def test_a_graph_that_cannot_be_run_is_an_error_with_its_reason(tmp_path) -> None:
    with pytest.raises(ExportError, match=r"softmax cannot be run at N=8 in onnxruntime: .*(exist|NO_SUCHFILE)"):
        growth.measure("softmax", tmp_path / "none.onnx", ComparisonPlan(), 8)
