"""The choice among ways to make a call: each is tried, the quickest by its usual time is used, and all are tried again later."""

from collections import Counter
from collections.abc import Callable

import pytest

from service.runtime.quicker import AGAIN, TRIES, Quicker


class Clock:
    """A clock that the calls advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[int] = []

    def call(self, way: int, seconds: Callable[[], float]) -> Callable[[], None]:
        def made() -> None:
            self.made.append(way)
            self.now += seconds()

        return made


def chosen(*seconds: Callable[[], float], calls: int) -> Counter[int]:
    """Which ways are taken after all were tried, and how often, in `calls` calls."""
    clock = Clock()
    quicker, ways = Quicker(lambda: clock.now), [clock.call(way, each) for way, each in enumerate(seconds)]
    for _ in range(len(ways) * TRIES + calls):
        quicker(ways)
    assert clock.made[: len(ways) * TRIES] == [way for way in range(len(ways)) for _ in range(TRIES)]
    return Counter(clock.made[len(ways) * TRIES :])


@pytest.mark.parametrize(("first", "second", "best"), [(1.0, 0.9, 1), (1.0, 0.97, 0), (0.9, 1.0, 0), (1.0, 1.0, 0)])
def test_the_quickest_way_is_taken_and_the_first_if_it_is_about_as_quick(first: float, second: float, best: int) -> None:
    assert chosen(lambda: first, lambda: second, calls=AGAIN) == {best: AGAIN}


def test_a_call_that_was_interrupted_and_the_first_one_do_not_count() -> None:
    interrupted = iter([50.0, 2, 2, 90, 2, 90, 2, 2])
    assert chosen(lambda: 3.0, lambda: next(interrupted, 2.0), calls=1) == {1: 1}


def test_all_ways_are_tried_again_because_the_machine_may_have_changed() -> None:
    clock, slow = Clock(), [2.0, 1.0]
    quicker = Quicker(lambda: clock.now)
    ways = [clock.call(way, lambda way=way: slow[way]) for way in (0, 1)]  # type: ignore[misc]
    for _ in range(2 * TRIES + AGAIN):
        quicker(ways)
    slow.reverse()
    clock.made.clear()
    for _ in range(2 * TRIES + AGAIN):
        quicker(ways)
    assert Counter(clock.made) == {0: TRIES + AGAIN, 1: TRIES}


def test_an_error_reaches_the_caller_and_does_not_count() -> None:
    quicker = Quicker()
    with pytest.raises(ZeroDivisionError):
        quicker([lambda: 1 // 0, lambda: None])  # type: ignore[list-item]
    made: list[int] = []
    for _ in range(TRIES):
        quicker([lambda: made.append(0), lambda: made.append(1)])
    assert made == [0] * TRIES
