"""Calls side by side: all of them are made, all have ended when it returns, and what one raises is raised."""

import threading
from collections.abc import Callable

import pytest

from service.runtime.side_by_side import SideBySide
from tests.service.fakes import PATIENCE_S


def raising(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_the_calls_run_at_the_same_time_and_the_first_is_the_callers() -> None:
    together, made = threading.Barrier(3, timeout=PATIENCE_S), list[str]()

    def call() -> None:
        together.wait()  # which only all three at once get through
        made.append(threading.current_thread().name)

    side_by_side = SideBySide(3)
    for _ in range(2):
        made.clear()
        side_by_side([call] * 3)
        assert sorted(made) == sorted([threading.current_thread().name, "side-0", "side-1"])


@pytest.mark.parametrize("place", [0, 1])
def test_what_a_call_raises_is_raised_when_the_others_have_ended(place: int) -> None:
    ended = list[int]()
    calls: list[Callable[[], None]] = [lambda: ended.append(1), lambda: ended.append(1)]
    calls[place] = raising(MemoryError("no room"))
    side_by_side = SideBySide(2)
    with pytest.raises(MemoryError, match="no room"):
        side_by_side(calls)
    assert ended == [1]
    side_by_side([lambda: ended.append(2)] * 2)  # and it goes on
    assert ended == [1, 2, 2]


def test_its_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    side_by_side = SideBySide(2)
    (thread,) = set(threading.enumerate()) - before
    side_by_side([lambda: None] * 2)
    del side_by_side
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
