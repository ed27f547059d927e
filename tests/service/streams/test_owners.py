"""Who sends a stream: leases, services that take a stream over from each other, and stores that fail."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.errors import StoreFailed
from service.states.record import Document, Quota
from service.states.sqlite import SqliteEngine
from service.states.store import GroupingEngine, Store
from service.streams.lease import LEASE_S, Lease, Leases
from service.streams.record import REQUEST_KIND, RUN_KIND, RunStart, new_run_id, owner_of, unpack
from service.telemetry.metrics import Metrics
from tests.service.fakes import PATIENCE_S, until
from tests.service.http.test_sse import _SCOPE
from tests.service.stream_fakes import Answer, Event, RealGenerator, gateway, parsed

PATH = "/v1/completions"
BODY = {"prompt": "a prompt", "max_tokens": 12, "seed": 3, "stream": True}

RUN = {
    "tenant": "",
    "path": PATH,
    "body": b"{}",
    "seeds": (3,),
    "answer_id": "a",
    "created": 0,
    "model": "m",
    "fingerprint": "f",
    "numerics": "n",
}


class OpenStream:
    """A stream that is read while it is sent, by a client that can go away."""

    def __init__(self, http: httpx.AsyncClient, **fields: Any) -> None:
        self.messages: list[Any] = []
        self.error: BaseException | None = None
        app: Any = http.app  # type: ignore[attr-defined]
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps({**BODY, **fields}).encode(), "more_body": False})
        self.task = asyncio.create_task(app({**_SCOPE, "path": PATH, "raw_path": PATH.encode()}, self.incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def run(self) -> str:
        return str(dict(self.messages[0]["headers"])[b"x-run-id"].decode())

    @property
    def events(self) -> list[Event]:
        return parsed(b"".join(message["body"] for message in self.messages[1:]).decode())

    @property
    def complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)

    async def until(self, events: int) -> None:
        await until(lambda: len(self.events) >= events)

    async def leave(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task


def leases_of(http: httpx.AsyncClient) -> Leases:
    found = http.app.state.catalog.leases  # type: ignore[attr-defined]
    assert isinstance(found, Leases)
    return found


def model_of(http: httpx.AsyncClient) -> RealGenerator:
    found = http.model  # type: ignore[attr-defined]
    assert isinstance(found, RealGenerator)
    return found


async def document(store: Store, run: str, kind: str = RUN_KIND) -> Document:
    return await store.call(lambda engine: engine.read("", kind, run))


async def written(store: Store) -> None:
    """Until all that was submitted before is stored."""
    await store.call(lambda engine: engine.usage(""))
    await asyncio.sleep(0)


@asynccontextmanager
async def held(http: httpx.AsyncClient, tokens: int = 3, **fields: Any) -> AsyncIterator[OpenStream]:
    """A stream whose engine stands still after so many tokens of each choice, all of which were sent."""
    steps = model_of(http).steps
    steps.hold()
    steps.release(tokens)  # the prompt, and all tokens but the last, which is sent before it is fed
    stream = OpenStream(http, **fields)
    await until(lambda: len(stream.messages) > 1 and stream.events and set(stream.events[-1].tokens) == {tokens})
    try:
        yield stream
    finally:
        steps.open()
        await stream.leave()


async def whole_of(http: httpx.AsyncClient, **fields: Any) -> Answer:
    return Answer.of(parsed((await http.post(PATH, json={**BODY, **fields})).text))


async def rest_of(http: httpx.AsyncClient, events: list[Event], **fields: Any) -> Answer:
    """What a client has that continues after these events."""
    answer = await http.post(PATH, json={**BODY, **fields}, headers={"last-event-id": events[-1].id or ""})
    assert answer.status_code == 200, answer.text
    return Answer.of([*events, *parsed(answer.text)])


def texts(answer: Answer) -> dict[int, Any]:
    """All but the id and the time."""
    assert answer.done
    return answer.choices


async def test_a_client_that_lost_its_connection_goes_on(http: httpx.AsyncClient, store: Store) -> None:
    whole = await whole_of(http, n=2)
    async with held(http, n=2) as stream:
        await stream.leave()
        model_of(http).steps.open()
        assert texts(await rest_of(http, stream.events, n=2)) == texts(whole)
        await written(store)
        kept = await document(store, stream.run)
        request = await document(store, stream.run, REQUEST_KIND)
    start, progress = unpack(stream.run, "", kept.body, request.body)
    assert (progress.status, owner_of(kept.body), kept.due, progress.ended) == ("completed", "", None, [True, True])
    assert [len(tokens) for tokens in progress.tokens] == [12, 12]
    assert kept.expires is not None
    assert request.expires is not None
    assert kept.expires < request.expires, "the request is there as long as the run"
    assert json.loads(start.body)["prompt"] == BODY["prompt"]


async def test_the_first_connection_ends_when_its_client_comes_back_on_another(http: httpx.AsyncClient) -> None:
    async with held(http) as stream:
        n_sent, steps = len(stream.events), model_of(http).steps
        events = stream.events
        going_on = asyncio.create_task(rest_of(http, events))
        await stream.ended()
        steps.open()
        rest = await going_on
        assert len(stream.events) == n_sent
        assert not stream.complete, "the connection is closed, and not as if the text were complete"
    assert texts(rest) == texts(await whole_of(http))


async def test_of_two_gateways_on_one_store_the_last_one_sends(http: httpx.AsyncClient, store: Store, tokenizer: Path) -> None:
    async with held(http) as stream, gateway(tokenizer, store) as other:
        assert texts(await rest_of(other, stream.events)) == texts(await whole_of(other))
        n_sent, lease = len(stream.events), leases_of(http).open[stream.run]
        lease.renew()  # as the task does that renews all
        await stream.ended()
        assert lease.lost
        assert (len(stream.events), stream.complete) == (n_sent, False)
        await written(store)
        assert owner_of((await document(store, stream.run)).body) == "", "the zombie's writes are refused"


async def test_a_gateway_that_was_paused_for_longer_than_its_lease_sends_nothing(
    http: httpx.AsyncClient, store: Store, tokenizer: Path
) -> None:
    late_s = 0.0
    leases = leases_of(http)
    clock, leases.clock = leases.clock, lambda: clock() + late_s
    async with held(http) as stream, gateway(tokenizer, store) as other:
        n_sent = len(stream.events)
        assert (await rest_of(other, stream.events)).done
        late_s = LEASE_S + 1
        model_of(http).steps.open()  # it goes on as if nothing had happened
        await stream.ended()
        assert (len(stream.events), stream.complete) == (n_sent, False)


async def test_a_gateway_that_was_paused_goes_on_if_nobody_took_its_stream(http: httpx.AsyncClient, store: Store) -> None:
    late_s = 0.0
    leases = leases_of(http)
    clock, leases.clock = leases.clock, lambda: clock() + late_s
    async with held(http) as stream:
        version = (await document(store, stream.run)).version
        late_s = LEASE_S + 1
        model_of(http).steps.open()
        await stream.ended()
        assert Answer.of(stream.events).done
        assert (await document(store, stream.run)).version > version, "it has renewed its lease"


async def test_a_stream_goes_on_after_the_whole_service_was_started_again(tokenizer: Path, tmp_path: Path) -> None:
    store = Store(SqliteEngine(tmp_path))
    async with gateway(tokenizer, store) as http:
        whole = await whole_of(http)
        async with held(http) as stream:
            leases_of(http).open[stream.run].renew()
            await written(store)
            leases_of(http).open[stream.run]._closed = True  # killed: nobody closes the lease
    store.close()
    store = Store(SqliteEngine(tmp_path))
    async with gateway(tokenizer, store) as http:
        assert texts(await rest_of(http, stream.events)) == texts(whole)
        calls = model_of(http).steps.calls
        assert len(calls) <= 12 - 2 + 2, "tokens that were stored are fed with the prompt"
    store.close()


async def test_the_document_is_written_with_the_first_token_and_has_a_lease(http: httpx.AsyncClient, store: Store) -> None:
    async with held(http) as stream:
        kept = await document(store, stream.run)
        found = await store.call(lambda engine: engine.due(RUN_KIND, 1e12, 10))
        assert [each.id for each in found] == [stream.run]
        assert kept.due is not None
        assert kept.expires is not None
        assert kept.due < kept.expires


async def test_progress_is_stored_now_and_then(http: httpx.AsyncClient, store: Store) -> None:
    answer = await http.post(PATH, json={**BODY, "max_tokens": 700, "ignore_eos": True})
    run = answer.headers["x-run-id"]
    await written(store)
    assert 4 <= (await document(store, run)).version <= 5, "the beginning, after 256 and 512 tokens, and the end"


# Without a document -----------------------------------------------------------------------------------------------------------------------


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
        await stream.ended()
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


async def test_tenants_do_not_see_each_others_runs(http: httpx.AsyncClient, store: Store) -> None:
    run = (await http.post(PATH, json=BODY)).headers["x-run-id"]
    await written(store)
    leases = leases_of(http)
    with pytest.raises(Exception, match="there is no run"):
        await leases.take_over("another", run, runs_s=1)
    lease = await leases.take_over("", run, runs_s=1)
    assert isinstance(lease, Lease)
    lease.close("cancelled")
    await written(store)
    with pytest.raises(Exception, match="was cancelled"):
        await leases.take_over("", run, runs_s=1)


async def test_a_write_whose_result_was_lost_is_no_loss(http: httpx.AsyncClient, store: Store) -> None:
    async with held(http) as stream:
        lease = leases_of(http).open[stream.run]

        def forget(engine: GroupingEngine) -> None:
            lease._version -= 1

        await store.call(forget)
        lease.renew()
        await written(store)
        await asyncio.sleep(0)
        assert not lease.lost


class Undoing(SqliteEngine):
    """A store in memory whose transactions are undone at their end while `undo` is set."""

    undo = False

    @contextmanager
    def group(self) -> Iterator[None]:
        with super().group():
            yield
            if self.undo:
                raise OSError("no space left on device")


async def test_a_write_that_was_undone_gives_no_right_over_the_next_owner() -> None:
    """Found by the simulation: the undone write had left the version one too high, which is that of the next owner's first write."""
    engine = Undoing(None)
    store, start = Store(engine), RunStart(**{**RUN, "id": new_run_id()})
    first, second = (Leases(store, Quota(states=10, size=2**20), Metrics()) for _ in range(2))
    try:
        lease = first.begin(start, 1, runs_s=60)
        assert await lease.begun(patient=True)
        engine.undo = True
        lease.renew()
        assert lease._latest is not None
        with pytest.raises(StoreFailed):
            await asyncio.wrap_future(lease._latest)
        engine.undo = False
        other = await second.take_over("", start.id, runs_s=60)
        lease.renew()
        await until(lambda: lease.lost)
        document = await store.call(lambda engine: engine.read("", RUN_KIND, start.id))
        assert owner_of(document.body) == other._owner
    finally:
        await first.stop()
        await second.stop()
        store.close()
