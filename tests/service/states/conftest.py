"""Every engine of states, for the tests of what all of them promise."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.states.sqlite import SqliteEngine
from service.states.store import GroupingEngine


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "folder"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Callable[[], GroupingEngine]]:
    """Opens the store; again, where it outlives its process."""
    made: list[GroupingEngine] = []

    def open_() -> GroupingEngine:
        if request.param == "memory" and made:
            return made[0]
        made.append(SqliteEngine(None if request.param == "memory" else tmp_path / "states", clock=clock))
        return made[-1]

    yield open_
    for engine in made:
        engine.close()


@pytest.fixture
def engine(opened: Callable[[], GroupingEngine]) -> GroupingEngine:
    return opened()
