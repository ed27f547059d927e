"""Every engine answers a random sequence of calls as the SQLite engine in memory does, also when several processes use it at once."""

import contextlib
import random
import threading
from collections.abc import Callable

import pytest

from service.errors import DocumentMoved
from service.states.engine import StateEngine
from service.states.record import Document, Quota
from service.states.sqlite import SqliteEngine
from tests.service.fakes import first
from tests.service.states.conftest import IN_REDIS, Clock
from tests.service.states.sequences import contents, step


@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize("opened", IN_REDIS, indirect=True)
def test_engines_agree_on_every_call(engine: StateEngine, clock: Clock, seed: int) -> None:
    model, clock.now = SqliteEngine(None, clock=clock), 0.0
    chances, made = [random.Random(seed), random.Random(seed)], ([], [])
    seen = ""
    for at in range(300):
        clock.now = float(at)
        (expected, got), states = (
            [step(each, chance, at, own) for each, chance, own in zip((model, engine), chances, made, strict=True)],
            [contents(each) for each in (model, engine)] if at % 5 == 0 else [None, None],
        )
        assert got == expected, f"call {at}"
        assert states[0] == states[1], f"after call {at}"
        seen += str(expected)
    for each in ("evicted", "has expired", "there is no state", "expects version", "another request", "Document(", "shared_by=2"):
        assert each in seen
    model.close()


@pytest.mark.parametrize("opened", ["folder", IN_REDIS[0]], indirect=True)
def test_one_of_many_writers_wins_each_version(opened: Callable[[], StateEngine]) -> None:
    quota, wins = Quota(states=1, size=10**6), []

    def write() -> None:
        engine = engines.pop()
        for _ in range(20):
            version = engine.read("acme", "run", "run_1").version
            with contextlib.suppress(DocumentMoved):
                wins.append(engine.write(Document(kind="run", id="run_1", tenant="acme", body=b"{}"), version, quota))

    first = opened()
    first.write(Document(kind="run", id="run_1", tenant="acme", body=b"{}"), 0, quota)
    engines = [opened() for _ in range(4)]
    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(wins) == list(range(2, len(wins) + 2))
    assert first.read("acme", "run", "run_1").version == len(wins) + 1
