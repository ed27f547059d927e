"""The choice among ways to make a call: each is tried, the quickest by its usual time is used, and all are tried again later."""

from collections import Counter
from collections.abc import Callable

import pytest

from service.runtime.quicker import AGAIN, FIRST, TRIES, Quicker


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
        quicker(ways, 1)
    assert clock.made[: len(ways) * TRIES] == [way for way in range(len(ways)) for _ in range(TRIES)]
    return Counter(clock.made[len(ways) * TRIES :])


@pytest.mark.parametrize(("first", "second", "best"), [(1.0, 0.9, 1), (1.0, 0.97, 0), (0.9, 1.0, 0), (1.0, 1.0, 0)])
def test_the_quickest_way_is_taken_and_the_first_if_it_is_about_as_quick(first: float, second: float, best: int) -> None:
    assert chosen(lambda: first, lambda: second, calls=FIRST) == {best: FIRST}


def test_a_call_that_was_interrupted_and_the_first_one_do_not_count() -> None:
    interrupted = iter([50.0, 90, 90, 90, 2, 2, 2, 2])  # without the first the median is 2, with it 26
    assert chosen(lambda: 3.0, lambda: next(interrupted, 2.0), calls=1) == {1: 1}


def test_calls_of_other_sizes_are_compared_by_the_time_for_a_size_of_one() -> None:
    """Streams end while the ways are tried: the second way, which is slower, gets the smaller calls."""
    clock = Clock()
    size = 15
    quicker, ways = Quicker(lambda: clock.now), [clock.call(0, lambda: 1.0 * size), clock.call(1, lambda: 1.3 * size)]
    for number in range(2 * TRIES):
        size = 15 if number < TRIES else 8
        quicker(ways, size)
    clock.made.clear()
    quicker(ways, size)
    assert clock.made == [0]


def test_all_ways_are_tried_again_because_the_machine_may_have_changed() -> None:
    """Soon at first, and then less often."""
    clock, slow = Clock(), [2.0, 1.0]
    quicker = Quicker(lambda: clock.now)
    ways = [clock.call(way, lambda way=way: slow[way]) for way in (0, 1)]  # type: ignore[misc]
    for kept in (FIRST, 4 * FIRST, AGAIN // 5 * 4, AGAIN, AGAIN):
        best = slow.index(1.0)
        clock.made.clear()
        for _ in range(2 * TRIES + kept):
            quicker(ways, 1)
        assert Counter(clock.made) == {best: TRIES + kept, 1 - best: TRIES}
        slow.reverse()


def test_an_error_reaches_the_caller_and_does_not_count() -> None:
    quicker = Quicker()
    with pytest.raises(ZeroDivisionError):
        quicker([lambda: 1 // 0, lambda: None], 1)  # type: ignore[list-item]
    made: list[int] = []
    for _ in range(TRIES):
        quicker([lambda: made.append(0), lambda: made.append(1)], 1)
    assert made == [0] * TRIES
