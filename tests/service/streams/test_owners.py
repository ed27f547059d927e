"""Who sends a stream: leases, and services that take a stream over from each other."""

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest

from service.states.sqlite import SqliteEngine
from service.states.store import Store
from service.streams.lease import LEASE_S, StreamLease
from service.streams.record import REQUEST_KIND, owner_of, unpack
from tests.service.stream_fakes import Answer, gateway, parsed
from tests.service.streams.open_streams import BODY, PATH, document, held, leases_of, model_of, rest_of, texts, whole_of, written


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
        await stream.done()
        steps.open()
        rest = await going_on
        assert len(stream.events) == n_sent
        assert not stream.complete, "the connection is closed, and not as if the text were complete"
    assert texts(rest) == texts(await whole_of(http))


async def test_a_reader_that_loses_its_stream_before_the_answer_begins_gets_409(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held(http) as stream:
        await stream.leave()
    monkeypatch.setattr(StreamLease, "begin", lambda lease: lease.lose())
    answer = await http.get(f"/v1/stream/{stream.run}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "document_moved")


async def test_a_completed_stream_has_any_number_of_readers_at_once(http: httpx.AsyncClient, store: Store) -> None:
    answer = await http.post(PATH, json=BODY)
    await written(store)
    before = await document(store, run := answer.headers["x-run-id"])
    for again in await asyncio.gather(*(http.get(f"/v1/stream/{run}") for _ in range(3))):
        assert texts(Answer.of(parsed(again.text))) == texts(Answer.of(parsed(answer.text)))
    await written(store)
    assert await document(store, run) == before, "no reader writes it"


async def test_a_client_that_comes_back_has_a_place_among_its_tenants_streams(tokenizer: Path, store: Store, tmp_path: Path) -> None:
    """The connection that it has lost counts until it is closed."""
    keys = [{"name": "laptop", "sha256": hashlib.sha256(b"secret").hexdigest(), "tenant": "acme", "streams": 1}]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    async with gateway(tokenizer, store, api_keys_file=tmp_path / "keys.json") as http:
        http.headers["authorization"] = "Bearer secret"
        whole = await whole_of(http)
        async with held(http, key="secret") as stream:
            going_on = asyncio.create_task(rest_of(http, stream.events))
            await stream.done()
            model_of(http).steps.open()
            assert texts(await going_on) == texts(whole)


async def test_of_two_gateways_on_one_store_the_last_one_sends(http: httpx.AsyncClient, store: Store, tokenizer: Path) -> None:
    async with held(http) as stream, gateway(tokenizer, store) as other:
        assert texts(await rest_of(other, stream.events)) == texts(await whole_of(other))
        n_sent, lease = len(stream.events), leases_of(http).open[stream.run]
        lease.renew()  # as the task does that renews all
        await stream.done()
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
        await stream.done()
        assert (len(stream.events), stream.complete) == (n_sent, False)


async def test_a_gateway_that_was_paused_goes_on_if_nobody_took_its_stream(http: httpx.AsyncClient, store: Store) -> None:
    late_s = 0.0
    leases = leases_of(http)
    clock, leases.clock = leases.clock, lambda: clock() + late_s
    async with held(http) as stream:
        version = (await document(store, stream.run)).version
        late_s = LEASE_S + 1
        model_of(http).steps.open()
        await stream.done()
        assert Answer.of(stream.events).done
        assert (await document(store, stream.run)).version > version, "it has renewed its lease"


async def test_a_stream_goes_on_after_the_whole_service_was_started_again(tokenizer: Path, tmp_path: Path) -> None:
    store = Store(SqliteEngine(tmp_path))
    async with gateway(tokenizer, store) as http:
        whole = await whole_of(http)
        async with held(http) as stream:
            leases_of(http).open[stream.run].renew()
            await written(store)
            leases_of(http).open[stream.run].closed = True  # killed: nobody closes the lease
    store.close()
    store = Store(SqliteEngine(tmp_path))
    async with gateway(tokenizer, store) as http:
        assert texts(await rest_of(http, stream.events)) == texts(whole)
        calls = model_of(http).steps.calls
        assert len(calls) <= 12 - 2 + 2, "tokens that were stored are fed with the prompt"
    store.close()


async def test_progress_is_stored_now_and_then(http: httpx.AsyncClient, store: Store) -> None:
    answer = await http.post(PATH, json={**BODY, "max_tokens": 700, "ignore_eos": True})
    run = answer.headers["x-run-id"]
    await written(store)
    assert 4 <= (await document(store, run)).version <= 5, "the beginning, after 256 and 512 tokens, and the end"


async def test_tenants_do_not_see_each_others_runs(http: httpx.AsyncClient, store: Store) -> None:
    run = (await http.post(PATH, json=BODY)).headers["x-run-id"]
    await written(store)
    leases = leases_of(http)
    with pytest.raises(Exception, match="there is no run"):
        await leases.take_over("another", run, runs_s=1)
    assert (await leases.take_over("", run, runs_s=1)).id == run
