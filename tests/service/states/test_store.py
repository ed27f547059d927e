"""A store on its thread: calls share groups, failures stay with their calls, and the queue is bounded."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from service.errors import InvalidRequest, Overloaded, QuotaExceeded, StateGone, StoreFailed
from service.states.engine import StateEngine
from service.states.record import DOCUMENT_BYTES, Document, Quota, Usage
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from service.telemetry.metrics import Metrics
from service.telemetry.state_store_metrics import StateStoreMetrics
from tests.service.fakes import PATIENCE_S
from tests.service.states.conftest import IN_REDIS, Clock
from tests.service.states.sequences import a_record

QUOTA = Quota(states=10, size=10**6)


class CountingEngine(SqliteEngine):
    """In memory; counts its groups."""

    groups = 0

    def __init__(self) -> None:
        super().__init__(None)

    @contextmanager
    def group(self) -> Iterator[None]:
        self.groups += not self._db.in_transaction
        with super().group():
            yield


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    made = Store(engine)
    yield made
    made.close()


def run(id: str) -> Document:
    return Document(kind="run", id=id, tenant="acme", body=b"{}")


def held(store: Store) -> threading.Event:
    """Keeps the store's thread busy until the event is set."""
    begun, free = threading.Event(), threading.Event()
    store.submit(lambda engine: (begun.set(), free.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    return free


def test_calls_that_wait_share_a_group(store: Store, engine: CountingEngine) -> None:
    free = held(store)
    futures = [store.submit(lambda engine, at=at: engine.write(run(f"run_{at}"), 0, QUOTA)) for at in range(10)]
    before = engine.groups
    free.set()
    assert [future.result(PATIENCE_S) for future in futures] == [1] * 10
    assert engine.groups == before + 1


def test_a_refused_call_leaves_the_others_of_its_group(store: Store) -> None:
    def refuse(engine: StateEngine) -> None:
        engine.write(run("run_2"), 0, QUOTA)
        raise InvalidRequest("no")

    free = held(store)
    first = store.submit(lambda engine: engine.write(run("run_1"), 0, QUOTA))
    second, third = store.submit(refuse), store.submit(lambda engine: 1 / 0)
    free.set()
    assert first.result(PATIENCE_S) == 1
    with pytest.raises(InvalidRequest):
        second.result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        third.result(PATIENCE_S)
    assert store.submit(lambda engine: engine.read("acme", "run", "run_1")).result(PATIENCE_S).version == 1


def test_a_failure_of_the_engine_fails_its_group(store: Store) -> None:
    free = held(store)
    first = store.submit(lambda engine: engine.write(run("run_1"), 0, QUOTA))
    second = store.submit(lambda engine: engine._db.execute("SELECT * FROM missing"))  # type: ignore[attr-defined]
    free.set()
    for future in (first, second):
        with pytest.raises(StoreFailed, match="no such table"):
            future.result(PATIENCE_S)
    assert store.submit(lambda engine: engine.documents("acme", "run", None, 5)).result(PATIENCE_S) == []


def test_a_full_queue_refuses_calls(store: Store) -> None:
    free = held(store)
    futures = [store.submit(lambda engine: None) for _ in range(4096)]
    with pytest.raises(Overloaded, match="4096 calls waiting"):
        store.submit(lambda engine: None)
    free.set()
    for future in futures:
        future.result(PATIENCE_S)


async def test_a_closed_store_has_carried_out_what_waited(engine: CountingEngine) -> None:
    store = Store(engine)
    free = held(store)
    future = store.submit(lambda engine: engine.write(run("run_1"), 0, QUOTA))
    free.set()
    store.close()
    assert future.result(0) == 1
    with pytest.raises(StoreFailed, match="closed"):
        await store.call(lambda engine: engine.usage("acme"))


def test_what_a_store_does_is_counted_without_tenants(engine: CountingEngine) -> None:
    metrics, quota = Metrics(), Quota(states=2, size=10**6)
    store = Store(engine, StateStoreMetrics(metrics))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    store.submit(lambda engine: engine.write(run("run_1"), 0, quota)).result(PATIENCE_S)
    kept = [store.submit(lambda engine, at=at: engine.put(a_record(at), b"1234", quota=quota)).result(PATIENCE_S) for at in range(4)]
    store.submit(lambda engine: engine._db.execute("UPDATE blobs SET content = ?", (b"5678",))).result(PATIENCE_S)  # type: ignore[attr-defined]
    with pytest.raises(StateGone):
        store.submit(lambda engine: engine.blob("acme", kept[-1].id)).result(PATIENCE_S)
    with pytest.raises(QuotaExceeded):
        store.submit(lambda engine: engine.put(a_record(5), bytes(10), quota=Quota(states=0, size=0))).result(PATIENCE_S)
    free = held(store)
    waits = [store.submit(lambda engine: None) for _ in range(3)]
    assert value("attnserve_state_store_queue") == 3
    free.set()
    waits[-1].result(PATIENCE_S)
    store.close()
    assert value("attnserve_states_ended_total", reason="evicted") == 2
    assert value("attnserve_states_ended_total", reason="damaged") == 2  # they shared it
    assert value("attnserve_state_damaged_blobs_total") == 1
    assert value("attnserve_states") == 0  # counted every 10 s
    assert value("attnserve_state_bytes") == DOCUMENT_BYTES + 2
    assert (value("attnserve_state_store_seconds_count") or 0) >= 9
    assert "acme" not in metrics.exposition().decode()


@pytest.mark.parametrize("opened", ["memory", IN_REDIS[0]], indirect=True)
def test_engines_count_what_ended(opened: Callable[[], StateEngine], clock: Clock) -> None:
    engine, quota = opened(), Quota(states=3, size=10**6)
    states = [engine.put(a_record(at, expires=None if at else clock.now + 5), b"%d" % at, quota=quota) for at in range(4)]
    engine.delete("acme", states[1].id)
    engine.put(a_record(5, tenant="other", expires=clock.now + 5), b"5", quota=quota)
    engine.write(run("run_1"), 0, quota)
    engine.write(run("run_2"), 0, Quota(states=1, size=10**6))
    clock.now += 6
    engine.sweep()
    assert dict(engine.ended) == {"evicted": 2, "deleted": 1, "expired": 1}
    assert engine.totals() == Usage(1, 5 + 2 * DOCUMENT_BYTES, 0)


async def test_a_call_that_fails_after_its_caller_has_left_is_not_logged(store: Store) -> None:
    free, told = held(store), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))

    def fail(engine: StateEngine) -> None:
        raise StoreFailed("no space left on device")

    calling = asyncio.ensure_future(store.call(fail))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    free.set()
    await asyncio.to_thread(store.close)
    await asyncio.sleep(0)
    gc.collect()
    assert not told
