"""Streams whose store fails, is slow, or loses what it had."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from service.errors import StateNotFound, StoreFailed
from service.states.engine import StateEngine
from service.states.record import Quota
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from service.streams import lease
from service.streams.lease import LEASE_S, Leases, StreamLease
from service.streams.record import REQUEST_KIND, RUN_KIND, RunStart, new_run_id, owner_of
from service.telemetry.metrics import Metrics
from tests.service.fakes import PATIENCE_S, until
from tests.service.stream_fakes import Answer, gateway, parsed
from tests.service.streams.open_streams import (
    BODY,
    PATH,
    RUN,
    begun,
    document,
    held,
    leases_of,
    model_of,
    rest_of,
    texts,
    whole_of,
    written,
)


async def counted(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    found = [line.split("} ") for line in lines if line.startswith("attnserve_unstored_runs_total{")]
    return {name.split('"')[1]: float(value) for name, value in found}


async def test_a_stream_needs_no_store(http: httpx.AsyncClient, store: Store) -> None:
    whole = await whole_of(http)
    store.close()
    answer = await http.post(PATH, json=BODY)
    assert (answer.status_code, "x-run-id" in answer.headers) == (200, False)
    events = parsed(answer.text)
    assert texts(Answer.of(events)) == texts(whole)
    assert {event.id for event in events} == {None}
    assert await counted(http) == {"store_failed": 1}
    assert (await http.post(PATH, json={**BODY, "durability": "turn"})).status_code == 503


async def test_a_stream_whose_store_fails_meanwhile_goes_on(http: httpx.AsyncClient, store: Store) -> None:
    late_s = 0.0
    leases = leases_of(http)
    clock, leases.clock = leases.clock, lambda: clock() + late_s
    async with held(http) as stream:
        store.close()
        late_s = LEASE_S + 1
        model_of(http).steps.open()
        await stream.done()
        assert Answer.of(stream.events).done


async def test_a_tenant_without_room_gets_its_stream(tokenizer: Path, store: Store) -> None:
    async with gateway(tokenizer, store, max_state_bytes=1024) as http:
        answer = await http.post(PATH, json={**BODY, "prompt": "long " * 300})
        assert (answer.status_code, "x-run-id" in answer.headers) == (200, False)
        assert Answer.of(parsed(answer.text)).done
        assert await counted(http) == {"state_quota_exceeded": 1}
        refused = await http.post(PATH, json={**BODY, "prompt": "long " * 300, "durability": "turn"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "state_quota_exceeded")
        await written(store)
        assert (await store.call(lambda engine: engine.usage(""))).size == 0, "nothing of it stays"


async def test_durability_decides_whether_a_stream_is_stored(http: httpx.AsyncClient, store: Store) -> None:
    answer = await http.post(PATH, json={**BODY, "durability": "none"})
    assert "x-run-id" not in answer.headers
    assert (await store.call(lambda engine: engine.usage(""))).size == 0
    answer = await http.post(PATH, json={**BODY, "durability": "turn"})
    assert answer.headers["x-run-id"]


async def test_a_request_that_is_refused_leaves_nothing(http: httpx.AsyncClient, store: Store) -> None:
    model_of(http).steps.bad_tokens = set(range(300))
    answer = await http.post(PATH, json=BODY)
    assert answer.status_code == 500
    await written(store)
    await written(store)
    assert (await store.call(lambda engine: engine.usage(""))).size == 0


# A store that is slow, undoes writes, or loses them ---------------------------------------------------------------------------------------


class Failing(SqliteEngine):
    """A store in memory whose transactions fail while `undo` or `hide` is set: they are undone, or they are durable nevertheless."""

    undo = hide = False

    @contextmanager
    def group(self) -> Iterator[None]:
        with super().group():
            yield
            if self.undo:
                raise OSError("no space left on device")
        if self.hide and not self._db.in_transaction:
            raise StoreFailed("the connection was lost before the answer")


@pytest.fixture
def failing() -> Failing:
    return Failing(None)


@pytest.fixture
def store(failing: Failing) -> Iterator[Store]:
    made = Store(failing)
    yield made
    made.close()


@contextmanager
def stopped(store: Store) -> Iterator[None]:
    """The store carries out nothing meanwhile."""
    going_on = threading.Event()
    store.submit(lambda engine: going_on.wait())
    try:
        yield
    finally:
        going_on.set()


async def test_a_slow_store_delays_no_stream_and_costs_no_ids(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_PATIENCE_S", 1e6)  # a stream that waits for a renewal waits for ever
    whole = await whole_of(http)
    with stopped(store):
        async with held(http) as stream:
            assert all((event.id or "").startswith(stream.run) for event in stream.events)
            await stream.leave()
        going_on = asyncio.create_task(rest_of(http, stream.events))
        await until(lambda: store._calls.qsize() >= 2)
        assert not going_on.done(), "a client that returns before the run is stored waits until it is"
    assert texts(await going_on) == texts(whole)
    assert await counted(http) == {}


async def test_a_first_write_that_fails_late_is_made_up_for(
    http: httpx.AsyncClient, store: Store, failing: Failing, tokenizer: Path
) -> None:
    whole = await whole_of(http)
    with stopped(store):
        stream = await begun(http)
        failing.undo = True
    with pytest.raises(StoreFailed):
        await written(store)
    failing.undo = False
    lease = leases_of(http).open[stream.run]
    lease.renew()
    await written(store)
    assert not lease.lost
    await stream.leave()
    model_of(http).steps.open()  # the engine cannot stop while its thread is held
    async with gateway(tokenizer, store) as other:
        assert texts(await rest_of(other, stream.events)) == texts(whole)
    assert (await counted(http))["store_failed"] >= 1


async def test_a_store_that_has_lost_the_run_gets_it_again(http: httpx.AsyncClient, store: Store, tokenizer: Path) -> None:
    """As Redis started again from a file that is a second old."""
    whole = await whole_of(http)
    async with held(http) as stream:
        await lose(store, stream.run)
        lease = leases_of(http).open[stream.run]
        lease.renew()
        await written(store)
        assert not lease.lost
        async with gateway(tokenizer, store) as other:
            assert texts(await rest_of(other, stream.events)) == texts(whole)
        lease.renew()
        await stream.done()
        assert lease.lost


async def test_a_process_that_wakes_after_its_run_has_expired_does_not_bring_it_back(http: httpx.AsyncClient, store: Store) -> None:
    async with held(http) as stream:
        await lose(store, stream.run)
        lease = leases_of(http).open[stream.run]
        assert isinstance(lease, StreamLease)
        lease._expires = 0.0
        n_sent = len(stream.events)
        lease.renew()
        await stream.done()
        assert (lease.lost, len(stream.events)) == (True, n_sent)
        with pytest.raises(StateNotFound):
            await document(store, stream.run)


async def test_a_write_whose_result_was_lost_is_no_loss(http: httpx.AsyncClient, store: Store, failing: Failing) -> None:
    async with held(http) as stream:
        lease, before = leases_of(http).open[stream.run], await document(store, stream.run)
        failing.hide = True
        lease.renew()
        with pytest.raises(StoreFailed):
            await written(store)
        failing.hide = False
        lease.renew()
        await written(store)
        assert not lease.lost
        assert (await document(store, stream.run)).version == before.version + 2


async def test_a_lease_is_renewed_while_its_stream_says_nothing(store: Store) -> None:
    start = RunStart(**{**RUN, "id": new_run_id()})
    leases = Leases(store, Quota(states=10, size=2**20), Metrics(), lease_s=0.01)
    lease, version = leases.begin(start, 1, runs_s=60), 0
    async with asyncio.timeout(PATIENCE_S):
        assert await lease.begun(patient=True)
        while version < 4:
            version = (await document(store, start.id)).version
    lease.close("completed")
    await written(store)
    ended = await document(store, start.id)
    assert (owner_of(ended.body), ended.due) == ("", None)
    await until(lambda: leases._renewing is None or leases._renewing.done())
    assert (await document(store, start.id)).version == ended.version


async def lose(store: Store, run: str) -> None:
    def erase(engine: StateEngine) -> None:
        for kind in (RUN_KIND, REQUEST_KIND):
            engine.erase("", kind, run, None)

    await store.call(erase)


async def test_a_write_that_was_undone_gives_no_right_over_the_next_owner(store: Store, failing: Failing) -> None:
    """Found by the simulation: the undone write had left the version one too high, which is that of the next owner's first write."""
    start = RunStart(**{**RUN, "id": new_run_id()})
    first, second = (Leases(store, Quota(states=10, size=2**20), Metrics()) for _ in range(2))
    lease = first.begin(start, 1, runs_s=60)
    assert await lease.begun(patient=True)
    failing.undo = True
    lease.renew()
    with pytest.raises(StoreFailed):
        await written(store)
    failing.undo = False
    other = await second.take_over("", start.id, runs_s=60)
    lease.renew()
    await until(lambda: lease.lost)
    assert owner_of((await document(store, start.id)).body) == other.owner
    await second.stop()
