"""Responses that are generated whatever their clients do: polled, followed, cancelled, and taken over by other processes."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from service.dialects.openai.responses import stored
from service.dialects.openai.responses.answer import Answer, Said
from service.dialects.openai.responses.events import Events, number_after, tokens_before
from service.dialects.openai.responses.live import Live
from service.dialects.openai.responses.running import running_of
from service.errors import InvalidRequest, Overloaded, StoreFailed
from service.streams.lease import LEASE_S
from tests.service.dialects.responses.conftest import Responses, service, so
from tests.service.fakes import PATIENCE_S, first
from tests.service.generation_fakes import SAID, FakeGenerator, events

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TOOLS = [ADD, {**ADD, "name": "sub"}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (SAID, {}),
    "logprobs": (SAID, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "stop": (SAID, {"stop": "café"}),
    "half a character": (SAID, {"max_output_tokens": len(SAID) - 1}),
    "one tool": ('{"a": 41}', {"tools": [ADD], "tool_choice": "required"}),
    "tools": ('{"name": "sub", "arguments": {"a": 41}}', {"tools": TOOLS, "tool_choice": "required"}),
}
forms = pytest.mark.parametrize("form", first(3, ["logprobs", "tools", "half a character", "text", "stop", "one tool"]))


async def begun(responses: Responses, after: int = 4, **fields: Any) -> dict[str, Any]:
    """A background response that has said so many tokens and is held."""
    responses.engine.hold(after)
    made = await responses.make(background=True, **fields)
    await responses.until(lambda _: responses.engine.runs and live_of(responses, made["id"]).answer.said.count == after, made["id"])
    return made


async def asked(responses: Responses, after: int = 4, **options: Any) -> tuple[asyncio.Task[httpx.Response], Live]:
    """A client that waits for a response, which has said so many tokens and is held."""
    responses.engine.hold(after)
    asking = asyncio.create_task(responses.ask("POST", **{"json": {"input": "Hi"}, **options}))
    await so(lambda: any(live.answer.said.count == after for live in responses.running._lives.values()))
    (live,) = responses.running._lives.values()
    return asking, live


def live_of(responses: Responses, response: str) -> Live:
    live = responses.running.live("", response)
    assert live is not None
    return live


def text_of(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    return str(item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


@pytest.mark.pool
async def test_a_background_response_is_polled_until_it_is_completed(responses: Responses) -> None:
    responses.engine.hold()
    made = await responses.make(background=True, metadata={"a": "b"})
    assert (made["status"], made["background"], made["output"], made["usage"]) == ("queued", True, [], None)
    responses.engine.release(4)
    half = await responses.until(lambda found: found["output"] and len(text_of(found)) == 4, made["id"])
    assert (half["status"], text_of(half)) == ("in_progress", "Once")
    responses.engine.release()
    whole = await responses.ended(made["id"])
    assert (whole["status"], text_of(whole), whole["metadata"]) == ("completed", SAID, {"a": "b"})
    assert whole["completed_at"] >= whole["created_at"]
    assert (await responses.make(input="More", previous_response_id=made["id"]))["status"] == "completed"


@pytest.mark.pool
async def test_cancelling_ends_a_background_response_once(responses: Responses) -> None:
    made = await begun(responses)
    cancelled = (await responses.ask("POST", f"/{made['id']}/cancel")).json()
    assert (cancelled["status"], text_of(cancelled), cancelled["output"][0]["status"]) == ("cancelled", "Once", "incomplete")
    assert responses.engine.runs[0].cancelled
    responses.engine.release()
    assert (await responses.ask("POST", f"/{made['id']}/cancel")).json() == cancelled == await responses.read(made["id"])
    *_, last = await responses.streamed(made["id"])
    assert last["type"] == "response.cancelled"
    done = await responses.make(background=True)
    completed = await responses.ended(done["id"])
    assert (await responses.ask("POST", f"/{done['id']}/cancel")).json() == completed


async def test_a_deleted_response_is_not_generated_on(responses: Responses) -> None:
    made = await begun(responses)
    await responses.ask("DELETE", f"/{made['id']}")
    await so(lambda: responses.engine.runs[0].cancelled)
    await responses.refused(404, "GET", f"/{made['id']}")


async def test_a_tenant_has_a_bounded_number_of_background_responses() -> None:
    async with service(max_background=2) as responses:
        responses.engine.hold()
        made = [await responses.make(background=True) for _ in range(2)]
        answer = await responses.ask("POST", json={"input": "Hi", "background": True})
        assert (answer.status_code, "the most is 2" in answer.text) == (429, True)
        await responses.ask("POST", f"/{made[0]['id']}/cancel")
        await responses.make(background=True)


# Streams ---------------------------------------------------------------------------------------------------------------------------------


def ids_of(stream: str) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in stream.splitlines() if line.startswith("id: ")]


def texts(told: list[Any]) -> str:
    return "".join(event["delta"] for event in told if event["type"].endswith(".delta"))


@pytest.mark.pool
@forms
async def test_a_stream_goes_on_after_any_of_its_events(responses: Responses, form: str) -> None:
    """Also after numbers that other processes may have given: theirs gather other tokens."""
    responses.engine.script, fields = FORMS[form]
    answer = await responses.ask("POST", json={"input": "Hi", "background": True, "stream": True, **fields})
    told = events(answer.text)
    made = told[-1]["response"]
    assert told[-1]["type"] in ("response.completed", "response.incomplete")
    assert made == await responses.read(made["id"])
    numbers = [event["sequence_number"] for event in told]
    assert numbers == sorted(set(numbers))
    assert texts(told) == text_of(made)
    again = await responses.streamed(made["id"])
    assert [event["type"] for event in again if "delta" not in event["type"]] == [
        event["type"] for event in told if "delta" not in event["type"]
    ]
    for number in range(numbers[-1] + 1):
        rest = await responses.streamed(made["id"], starting_after=number)
        assert all(event["sequence_number"] > number for event in rest)
        assert rest[-1:] == ([told[-1]] if number < numbers[-1] else [])
        by_header = await responses.ask("GET", f"/{made['id']}?stream=true&starting_after=1", headers={"last-event-id": str(number)})
        assert ids_of(by_header.text) == [event["sequence_number"] for event in rest]
        assert by_header.status_code == (200 if rest else 204)  # 204 ends a browser's EventSource
        if number in numbers:
            before = [event for event in told if event["sequence_number"] <= number]
            assert texts(before) + texts(rest) == text_of(made)
            kinds = [event["type"] for event in before + rest]
            assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(event["type"] for event in told))
            assert kinds.count("response.output_item.added") == 1
            logprobs = [each for event in before + rest if "delta" in event for each in event.get("logprobs", [])]
            assert logprobs == (made["output"][0]["content"][0]["logprobs"] if made["output"][0]["type"] == "message" else [])
    for number in (numbers[-1] + 1, 2**52):
        refused = await responses.refused(400, "GET", f"/{made['id']}?stream=true&starting_after={number}")
        assert (refused["param"], f"which has the number {numbers[-1]}:" in refused["message"]) == ("starting_after", True)


@forms
async def test_a_stored_response_behind_its_client_repeats_nothing(responses: Responses, form: str) -> None:
    """The client has read tokens at the process that generates them, and goes on at one that reads them later from the store."""
    responses.engine.script, fields = FORMS[form]
    made = await responses.make(**fields)
    whole = (await row_of(responses, made["id"])).answer()
    said = whole.said

    def stored_after(count: int) -> Answer:
        part = Said([], said.ends[:count], said.text[: said.end(count)], said.logprobs[:count])
        return Answer({**whole.head, "status": "in_progress"}, part, whole.call)

    def sent(script: Events, *answers: Answer) -> list[Any]:
        return events(b"".join(script.pieces([each]) for each in answers).decode())

    for event in sent(Events(whole), *map(stored_after, range(1, said.count + 1))):
        number = event["sequence_number"]
        known = tokens_before(number)
        for behind in (0, known // 2, known):
            script = Events(stored_after(behind), number)
            assert sent(script, stored_after(behind)) == []
            assert sent(script, whole) == sent(Events(whole, number), whole)


async def test_a_stream_of_a_live_response_goes_on_where_it_was_left(responses: Responses) -> None:
    made = await begun(responses, after=5)
    beyond = Events(live_of(responses, made["id"]).answer, number_after(1_000))
    following = [asyncio.create_task(responses.streamed(made["id"], starting_after=number_after(3))) for _ in range(2)]
    await asyncio.sleep(0.05)
    responses.engine.release()
    for told in await asyncio.gather(*following):
        assert texts(told) == SAID[3:]
        assert (told[0]["type"], told[-1]["type"]) == ("response.output_text.delta", "response.completed")
    with pytest.raises(InvalidRequest, match="beyond the last event of this response"):
        list(beyond.closing())


async def test_a_reader_that_leaves_does_not_end_a_background_response(responses: Responses) -> None:
    responses.engine.hold(4)
    streaming = asyncio.create_task(responses.ask("POST", json={"input": "Hi", "background": True, "stream": True}))
    await so(lambda: responses.engine.runs and responses.engine.runs[0].usage.completion_tokens >= 4)
    store: Any = responses.engine.states
    (row,) = await store.call(lambda engine: engine.documents("", "response", None, 10))
    streaming.cancel()
    responses.engine.release()
    assert text_of(await responses.ended(row.id)) == SAID


# Other processes -------------------------------------------------------------------------------------------------------------------------


async def row_of(responses: Responses, response: str) -> stored.Row:
    store: Any = responses.engine.states
    row: stored.Row = await store.call(lambda engine: stored.find(engine, "", response))
    return row


def lease_of(live: Live) -> stored.ResponseLease:
    assert live.lease is not None
    return live.lease


async def paused(responses: Responses, live: Live) -> None:
    """Have another process's sweep find the response: the lease of its owner is over, and the owner does not know."""
    del responses.running._lives["", live.answer.head["id"]], responses.leases.open[live.answer.head["id"]]
    store: Any = responses.engine.states
    await store.call(lambda engine: engine._db.execute("UPDATE documents SET due = 1 WHERE kind = 'response'"))


@pytest.mark.pool
@forms
@pytest.mark.parametrize("after", first(1, [5, 0]))
async def test_a_restarted_service_finishes_a_response_with_the_same_tokens(
    tmp_path: Path, quick_polls: None, form: str, after: int
) -> None:
    script, fields = FORMS[form]
    model = FakeGenerator("wordy")
    model.engine.script = script
    asked: dict[str, Any] = {**fields, "seed": 5, "store_state": {"name": "doc"}}
    async with service(model, states=str(tmp_path)) as responses:
        plain = await responses.make(**asked)
        made = await begun(responses, after, **asked)
        seed = responses.engine.requests[-1].sampling.seed
    model = FakeGenerator("wordy")
    model.engine.script = script
    async with service(model, states=str(tmp_path)) as responses:
        await responses.running.sweep()
        whole = await responses.ended(made["id"])
        (request,) = responses.engine.requests
        assert (request.sampling.seed, len(request.known)) == (seed, max(0, after - 1))
        same = ("status", "incomplete_details", "usage", "metadata", "tools", "text")
        assert {name: whole[name] for name in same} == {name: plain[name] for name in same}
        assert text_of(whole) == text_of(plain)
        if whole["output"][0]["type"] == "message":
            assert whole["output"][0]["content"] == plain["output"][0]["content"]
        assert whole["created_at"] == made["created_at"]
        assert await responses.text(whole["state"]["id"]) == await responses.text(plain["state"]["id"])
        told = await responses.streamed(made["id"])
        assert texts(told) == text_of(plain)


async def test_a_paused_owner_writes_and_sends_nothing(responses: Responses, quick_polls: None) -> None:
    made = await begun(responses)
    zombie = live_of(responses, made["id"])
    following = asyncio.create_task(responses.streamed(made["id"]))
    await responses.until(lambda _: lease_of(zombie)._count == 4, made["id"])
    await paused(responses, zombie)
    await responses.running.sweep()
    assert live_of(responses, made["id"]) is not zombie
    responses.engine.release()
    whole = await responses.ended(made["id"])
    await so(lambda: zombie.ended)
    assert (zombie.lost, whole["status"], text_of(whole)) == (True, "completed", SAID)
    assert (await row_of(responses, made["id"])).owners == 2
    assert texts(await following) == SAID, "its readers go on with the response of the other owner"
    states = (await responses.http.get("/v1/states")).json()["data"]
    assert [state["id"] for state in states] == [whole["state"]["id"]], "the state is kept once"


async def test_a_response_cancelled_elsewhere_is_given_up(responses: Responses, quick_polls: None) -> None:
    made = await begun(responses)
    live = live_of(responses, made["id"])
    del responses.running._lives["", made["id"]]
    assert (await responses.ask("POST", f"/{made['id']}/cancel")).json()["status"] == "cancelled"
    responses.engine.release()
    await so(lambda: live.ended)
    assert (live.lost, (await responses.read(made["id"]))["status"]) == (True, "cancelled")


async def test_a_response_deleted_elsewhere_leaves_no_state(responses: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await begun(responses)
    live = live_of(responses, made["id"])
    del responses.running._lives["", made["id"]]
    monkeypatch.setattr(lease_of(live), "_next", float("inf"))  # its next write is its last
    await responses.ask("DELETE", f"/{made['id']}")
    responses.engine.release()
    await so(lambda: live.ended)
    assert live.lost
    assert (await responses.http.get("/v1/states")).json()["data"] == []


async def test_a_response_whose_stream_died_with_its_process_has_failed(tmp_path: Path) -> None:
    """Also if its document was written before documents named their owner, or has a field of a later version."""
    async with service(states=str(tmp_path)) as responses:
        made = await responses.make()
        row = await row_of(responses, made["id"])
        lost = replace(row, response={**row.response, "status": "in_progress", "output": []}, due=1.0)
        store: Any = responses.engine.states
        fields = orjson.loads(lost.document().body)
        del fields["owner"]
        fields["later"] = 1
        old = replace(lost.document(), body=orjson.dumps(fields))
        await store.call(lambda engine: engine.write(old, row.version, stored.Quota(100, 2**20)))
        await responses.running.sweep()
        failed = await responses.read(made["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        await responses.running.sweep()
        assert await responses.read(made["id"]) == failed


async def test_a_response_that_a_client_waits_for_has_a_lease(responses: Responses) -> None:
    asking, live = await asked(responses)
    row, lease = await row_of(responses, live.answer.head["id"]), lease_of(live)
    assert (row.owner, responses.leases.open) == (lease.owner, {row.id: lease})
    assert row.due is not None
    assert row.due <= time.time() + LEASE_S
    responses.engine.release()
    assert text_of((await asking).json()) == SAID
    assert not responses.leases.open


async def test_a_write_whose_result_was_lost_costs_no_response(responses: Responses) -> None:
    made = await begun(responses)
    store: Any = responses.engine.states
    await store.call(lambda engine: engine._db.execute("UPDATE documents SET version = version + 1 WHERE kind = 'response'"))
    responses.engine.release()
    assert text_of(await responses.ended(made["id"])) == SAID
    assert len(responses.engine.requests) == 1, "it is not generated again by another owner"


async def test_a_client_that_leaves_while_news_arrive_is_noticed(responses: Responses) -> None:
    asking, live = await asked(responses)
    waiting = asyncio.create_task(live.wait(PATIENCE_S))
    await asyncio.sleep(0)
    live._tell()  # in the same turn of the event loop as the cancellation, which no client can be timed to do
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    responses.engine.release()
    assert text_of((await asking).json()) == SAID


@pytest.mark.parametrize(("stream", "fault"), [(False, "the client leaves"), (True, "the process is killed")])
async def test_a_request_with_a_key_is_carried_out_whatever_happens_to_the_first(
    tmp_path: Path, quick_polls: None, fault: str, stream: bool
) -> None:
    request: dict[str, Any] = {"json": {"input": "Hi", "stream": stream}, "headers": {"Idempotency-Key": "k"}}
    async with service(states=str(tmp_path)) as responses:
        asking, live = await asked(responses, **request)
        made = live.answer.head["id"]
        if fault == "the process is killed":
            await paused(responses, live)
            lease_of(live).lost = True  # as if its process were killed: it writes nothing
        asking.cancel()
        await so(lambda: live.ended)
    async with service(states=str(tmp_path)) as responses:
        again = asyncio.create_task(responses.ask("POST", **request))
        await responses.running.sweep()
        answer = await again
        assert answer.headers.get("idempotent-replayed") == "true", answer.text
        response = events(answer.text)[-1]["response"] if stream else answer.json()
        assert (response["id"], response["status"], text_of(response)) == (made, "completed", SAID)
        assert len(responses.engine.requests) == 1


async def test_a_response_that_ends_its_processes_is_given_up(responses: Responses) -> None:
    made = await begun(responses)
    for _ in range(5):
        await responses.until(lambda found: responses.running.live("", made["id"]), made["id"])
        live = live_of(responses, made["id"])
        await paused(responses, live)
        if live._task is not None:
            live._task.cancel()
            lease_of(live).lost = True  # as if its process were killed: it writes nothing
        await responses.running.sweep()
    ended = await responses.ended(made["id"])
    assert (ended["status"], "5 processes were lost with it" in ended["error"]["message"]) == ("failed", True)


async def test_an_overloaded_service_keeps_a_background_response_queued(responses: Responses) -> None:
    responses.engine.refusal = Overloaded("the queue is full", retry_after_s=0.01)
    made = await responses.make(background=True)
    await so(lambda: responses.running.live("", made["id"]) is None)
    assert (await responses.read(made["id"]))["status"] == "queued"
    responses.engine.refusal = None
    await asyncio.sleep(0.02)
    await responses.running.sweep()
    assert text_of(await responses.ended(made["id"])) == SAID


async def test_a_store_that_fails_at_the_end_costs_a_background_response_nothing(
    responses: Responses, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await begun(responses)
    live, store = live_of(responses, made["id"]), responses.engine.states
    assert store is not None

    def fail(*_: Any) -> None:
        raise StoreFailed("the store of states failed: disk full")

    with monkeypatch.context() as broken:
        broken.setattr(store._engine, "write", fail)
        responses.engine.release()
        await so(lambda: live.ended)
    await store.call(lambda engine: engine._db.execute("UPDATE documents SET due = 1 WHERE kind = 'response'"))  # type: ignore[attr-defined]
    await responses.running.sweep()
    whole = await responses.ended(made["id"])
    assert (whole["status"], text_of(whole)) == ("completed", SAID)


async def test_the_work_of_a_response_is_erased_when_it_has_ended(responses: Responses) -> None:
    made = await begun(responses)
    assert (await row_of(responses, made["id"])).work is not None
    responses.engine.release()
    await responses.ended(made["id"])
    row = await row_of(responses, made["id"])
    assert (row.work, row.ids, row.due) == (None, [], None)
    assert running_of(responses.app.state.catalog) is responses.running
