"""Threads that compute give way to all others, so that an answer that is ready, or a request that comes, does not wait for a core."""

import os
import sys
import threading
from typing import Any

import pytest

from export import contract
from service.encoding.cache import VectorCache
from service.encoding.engine import EncoderEngine, EncoderLimits, EncodeTask
from service.runtime.priority import NICER, give_way
from service.runtime.side_by_side import SideBySide
from service.telemetry.metrics import Metrics, ModelMetrics
from service.tokenization.texts import Encoded
from tests.service.fakes import FakeSession

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")


def niceness() -> int:
    """That of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_that_gives_way_lowers_its_own_priority_alone() -> None:
    before, found = niceness(), list[int]()

    def compute() -> None:
        give_way()
        found.append(niceness())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [min(19, before + NICER)]
    assert niceness() == before


def test_where_the_system_forbids_it_the_thread_computes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden)
    made: list[int] = []
    SideBySide(2)([lambda: made.append(1), lambda: made.append(2)])
    assert sorted(made) == [1, 2]


async def test_the_threads_of_an_encoder_give_way() -> None:
    found: list[int] = []

    class Session(FakeSession):
        def run(self, *arguments: Any, **options: Any) -> Any:
            found.append(niceness())
            return super().run(*arguments, **options)

    limits = EncoderLimits(run_cost_tokens=16, tokens_per_s=1e9)
    metrics = ModelMetrics(Metrics(), "fake")
    engine = EncoderEngine(Session(), fingerprint="f", limits=limits, metrics=metrics, cache=VectorCache(0))
    engine.start()
    await engine.run(EncodeTask(inputs=[Encoded([1, 2], None, 2)], outputs=(contract.EMBEDDING,)))
    await engine.stop()
    assert found == [min(19, niceness() + NICER)]
