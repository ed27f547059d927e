"""Exponents of known curves, and lengths that are not tried."""

import pytest

from export.comparison import growth
from export.comparison.growth import Point
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


def point(N: int, *, s: float = 0.01, MiB: float = 1) -> Point:
    return Point(N=N, s=s, runs=3, peak_bytes=int(MiB * 2**20))


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([point(1024, MiB=100), point(2048, MiB=400)], "memory at N=4,096 would take some 1.56 GiB, and 1 GiB is the limit"),
        ([point(1024, s=10), point(2048, s=40)], "a run at N=4,096 would take some 160 s, and 60 s is the limit"),
        ([point(1024, MiB=100), point(2048, MiB=200)], None),
        ([point(2048, MiB=4000)], None),  # the first two lengths are always tried
    ],
)
def test_a_length_that_would_take_too_much_is_left_out_with_the_reason(points: list[Point], reason: str | None) -> None:
    assert growth.too_much(points, 4096, memory_bytes=2**30, longest_run_s=60) == reason


def test_a_graph_that_cannot_be_run_is_an_error_with_its_reason(tmp_path) -> None:
    with pytest.raises(ExportError, match=r"none.onnx cannot be run at N=8: .*(exist|NO_SUCHFILE)"):
        growth.measure(tmp_path / "none.onnx", 8, d_model=4, seconds=1)
