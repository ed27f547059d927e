"""Responses in the store: read, continued, listed, deleted, made once."""

import asyncio
from typing import Any

import httpx
import pytest

from service.dialects.openai.responses.live import Live
from service.errors import RuntimeFailed, StateGone, StoreFailed
from service.settings import STATES_PASSWORD
from tests.service.dialects.responses.conftest import NO_RESPONSE, Responses, service, so
from tests.service.fakes import PATIENCE_S, case, put_forward
from tests.service.generation_fakes import SAID, FakeGenerator, events
from tests.service.states.conftest import PASSWORD, RedisServer, redis_server

__all__ = ("redis_server",)  # a fixture

FED = "<s><user>Hi\n<assistant>"
N_FED = len(FED) - len("<s>") + 1
N_SAID = len(SAID.encode()) + 1
NEXT = "\n<user>More\n<assistant>"  # what the template writes after a turn of the model


async def test_a_response_is_read_as_it_was_answered(responses: Responses) -> None:
    made = await responses.make(metadata={"a": "b"})
    assert await responses.read(made["id"]) == made
    assert (made["status"], made["store"], made["background"]) == ("completed", True, False)
    assert await responses.text(made["state"]["id"]) == FED + SAID + "</s>"


async def test_the_state_of_a_response_names_it(responses: Responses) -> None:
    made = await responses.make()
    await responses.http.post(f"/v1/states/{made['state']['id']}/fork")
    (state,) = (await responses.http.get("/v1/states", params={"origin": "response"})).json()["data"]
    assert (state["id"], state["origin"], state["response"]) == (made["state"]["id"], "response", made["id"])
    assert (await responses.http.get("/v1/states", params={"origin": "answer"})).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_without_its_store_nothing_is_generated(responses: Responses, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    store: Any = responses.engine.states

    def fail(*_: Any) -> None:
        raise StoreFailed("the store of states failed: disk full")

    monkeypatch.setattr(store._engine, "write_all", fail)
    assert (await responses.refused(503, "POST", json={"input": "Hi", "stream": stream}))["code"] == "store_failed"
    assert not responses.engine.requests
    assert (await responses.make(store=False))["status"] == "completed"


async def test_a_stream_that_failed_is_stored_with_its_reason(responses: Responses) -> None:
    responses.engine.failures[0] = (4, RuntimeFailed("broken"))
    answer = await responses.ask("POST", json={"input": "Hi", "stream": True})
    *_, last = events(answer.text)
    stored = await responses.read(last["response"]["id"])
    assert (stored["status"], stored["error"]) == ("failed", {"code": "server_error", "message": "broken"})
    assert stored["output"][0]["content"][0]["text"] == "Once"
    error = await responses.refused(400, "POST", json={"input": "More", "previous_response_id": stored["id"]})
    assert "is failed, and only a completed or incomplete one" in error["message"]


# Continuing ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.pool
@pytest.mark.parametrize("limits", [{}, {"max_output_tokens": 4}], ids=["completed", "incomplete"])
async def test_a_response_continues_the_one_before_at_the_cost_of_what_is_new(responses: Responses, limits: dict[str, int]) -> None:
    first = await responses.make(**limits)
    n_first = first["usage"]["output_tokens"]
    second = await responses.make(input="More", previous_response_id=first["id"], instructions=None)
    request = responses.engine.requests[-1]
    assert responses.model.decode(request.prompt) == NEXT
    assert (request.start[:3], second["previous_response_id"]) == (("", first["state"]["id"], True), first["id"])
    usage = second["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == N_FED + n_first
    assert usage["input_tokens"] == N_FED + n_first + len(NEXT)
    assert usage["total_tokens"] == usage["input_tokens"] + N_SAID
    said = SAID + "</s>" if not limits else SAID[:4]
    assert await responses.text(second["state"]["id"]) == FED + said + NEXT + SAID + "</s>"


async def test_only_a_response_that_has_ended_well_is_continued(responses: Responses) -> None:
    responses.engine.hold()
    made = await responses.make(background=True)
    body = {"input": "More", "previous_response_id": made["id"]}
    error = await responses.refused(400, "POST", json=body)
    assert (error["param"], "wait until it is completed" in error["message"]) == ("previous_response_id", True)
    await responses.ask("POST", f"/{made['id']}/cancel")
    assert "is cancelled" in (await responses.refused(400, "POST", json=body))["message"]


@pytest.mark.parametrize("why", ["deleted", "expired", "damaged"])
async def test_a_state_that_is_gone_is_never_computed_again(responses: Responses, why: str) -> None:
    first = await responses.make()
    state, store = first["state"]["id"], responses.engine.states
    assert store is not None
    engine: Any = store._engine
    if why == "deleted":
        await responses.http.delete(f"/v1/states/{state}")
    elif why == "expired":
        await responses.http.patch(f"/v1/states/{state}", json={"ttl_s": 10})
        responses.later(20)
    else:
        await store.call(lambda _: engine._db.execute("UPDATE blobs SET content = zeroblob(3)"))
        with pytest.raises(StateGone, match="damaged"):
            await store.call(lambda _: engine.blob("", state))
    error = await responses.refused(410, "POST", json={"input": "More", "previous_response_id": first["id"]})
    assert (error["code"], error["param"]) == ("state_gone", "previous_response_id")
    assert why in error["message"]
    assert len(responses.engine.requests) == 1
    assert (await responses.streamed(first["id"]))[-1]["type"] == "response.completed", "its text can still be read"


async def test_a_response_expires_with_its_state() -> None:
    async with service(state_ttl_s=50) as responses:
        made = await responses.make()
        responses.later(60)
        await responses.refused(404, "GET", f"/{made['id']}")
        error = await responses.refused(404, "POST", json={"input": "More", "previous_response_id": made["id"]})
        assert error["code"] == "previous_response_not_found"


# Reading and deleting --------------------------------------------------------------------------------------------------------------------


async def test_a_deleted_response_takes_its_state_with_it(responses: Responses) -> None:
    made, named = await responses.make(), await responses.make(store_state={"name": "doc"})
    for each in (made, named):
        answer = await responses.ask("DELETE", f"/{each['id']}")
        assert answer.json() == {"id": each["id"], "object": "response", "deleted": True}
        await responses.refused(404, "GET", f"/{each['id']}")
        await responses.refused(404, "DELETE", f"/{each['id']}")
    assert (await responses.http.get(f"/v1/states/{made['state']['id']}")).status_code == 404
    assert (await responses.http.get("/v1/states/doc")).json()["id"] == named["state"]["id"]


INPUT: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
    {"role": "assistant", "content": "A"},
]


async def test_input_items_are_listed_in_pages(responses: Responses) -> None:
    made = await responses.make(input=INPUT)
    path = f"/{made['id']}/input_items"
    whole = (await responses.ask("GET", path, params={"order": "asc"})).json()
    assert [item["type"] for item in whole["data"]] == ["message", "message", "function_call", "function_call_output", "message"]
    assert whole["data"][1]["content"] == [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    ids = [item["id"] for item in whole["data"]]
    assert (whole["first_id"], whole["last_id"], whole["has_more"], len(set(ids))) == (ids[0], ids[-1], False, 5)
    found: list[str] = []
    after = None
    while True:
        page = (await responses.ask("GET", path, params={"limit": 2, **({"after": after} if after else {})})).json()
        found += [item["id"] for item in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == ids[::-1]
    assert (await responses.refused(400, "GET", path, params={"after": "msg_x"}))["param"] == "after"


async def test_a_foreign_response_is_a_missing_one(keyed: tuple[Responses, Responses]) -> None:
    mine, other = keyed
    made = await mine.make()
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")):
        foreign = await other.refused(404, method, f"/{made['id']}{end}")
        missing = await other.refused(404, method, f"/{NO_RESPONSE}{end}")
        assert foreign["message"].replace(made["id"], NO_RESPONSE) == missing["message"]
    error = await other.refused(404, "POST", json={"input": "More", "previous_response_id": made["id"]})
    assert error == {
        "message": f"Previous response with id '{made['id']}' not found.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }
    assert await mine.read(made["id"]) == made


async def test_what_is_wrong_in_a_query_is_named(responses: Responses) -> None:
    made = await responses.make()
    cases: list[Any] = [
        ({"starting_after": 3}, "starting_after"),
        ({"stream": "true", "starting_after": -1}, "starting_after"),
        ({"stream": "true", "starting_after": 2**70}, "starting_after"),
        ({"stream": "true", "starting_after": "null"}, "starting_after"),
        ({"stream": "maybe"}, "stream"),
        ({"include[]": "x"}, "include"),
        ({"starting-after": 3, "stream": "true"}, "starting-after"),
    ]
    for query, param in cases:
        with case(query, param):
            assert param in (await responses.refused(400, "GET", f"/{made['id']}", params=query))["param"]


async def test_an_id_of_another_stream_is_refused(responses: Responses) -> None:
    made = await responses.make()
    for other in ("run_a:1", "99999"):
        refused = await responses.refused(400, "GET", f"/{made['id']}?stream=true", headers={"last-event-id": other})
        assert (refused["param"], other in refused["message"]) == ("last-event-id", True)


# Idempotency -----------------------------------------------------------------------------------------------------------------------------


async def test_a_request_with_the_same_key_answers_the_same_response(responses: Responses) -> None:
    key = {"Idempotency-Key": "k1"}
    made = await responses.make(headers=key)
    again = await responses.ask("POST", json={"input": "Hi"}, headers=key)
    assert (again.json(), again.headers["idempotent-replayed"]) == (made, "true")
    assert (await responses.refused(409, "POST", json={"input": "Ho"}, headers=key))["code"] == "idempotency_key_reused"
    assert len(responses.engine.requests) == 1
    await responses.ask("DELETE", f"/{made['id']}")
    assert (await responses.make(headers=key))["id"] != made["id"]
    bad = await responses.refused(400, "POST", json={"input": "Hi"}, headers={"Idempotency-Key": "a b"})
    assert bad["param"] == "Idempotency-Key"
    assert (await responses.refused(400, "POST", json={"input": "Hi", "store": False}, headers=key))["param"] == "Idempotency-Key"


async def test_a_null_is_an_absent_field_for_a_key_too(responses: Responses) -> None:
    key = {"Idempotency-Key": "k"}
    made = await responses.make(headers=key, metadata={"a": "1", "b": "2"})
    again = await responses.make(headers=key, metadata={"b": "2", "a": "1"}, user=None, tools=None, conversation=None)
    assert again["id"] == made["id"]
    huge = [{"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "logprobs": [2**70]}]}]
    assert (await responses.make(headers={"Idempotency-Key": "l"}, input=huge))["status"] == "completed"


async def test_a_second_request_waits_for_the_first_one(responses: Responses, quick_polls: None) -> None:
    responses.engine.hold(4)
    both = [asyncio.create_task(responses.make(headers={"Idempotency-Key": "k"})) for _ in range(2)]
    await so(lambda: responses.engine.requests)
    await asyncio.sleep(0.05)
    responses.engine.release()
    first, second = await asyncio.gather(*both)
    assert first == second
    assert len(responses.engine.requests) == 1


@pytest.mark.parametrize("tokens", [0, 4])
async def test_a_second_request_answers_at_its_deadline_what_there_is(
    responses: Responses, quick_polls: None, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    waiting: dict[Any, int] = {}  # how many tokens there were when a request last began to wait
    wait, forward, key = Live.wait, put_forward(monkeypatch), {"Idempotency-Key": "k"}

    async def noted(live: Live, timeout_s: float) -> None:
        waiting[asyncio.current_task()] = live.answer.said.count
        await wait(live, timeout_s)

    monkeypatch.setattr(Live, "wait", noted)
    responses.engine.hold(tokens)
    first = asyncio.create_task(responses.make(headers=key))
    await so(lambda: list(waiting.values()) == [tokens])
    asking = asyncio.create_task(responses.ask("POST", json={"input": "Hi"}, headers={**key, "x-request-timeout-ms": "1000000"}))
    await so(lambda: list(waiting.values()) == [tokens] * 2)
    await forward(1001)
    second = await asking
    responses.engine.release()
    whole = await first
    if tokens:
        told = second.json()
        assert (told["id"], told["status"], told["output"][0]["content"][0]["text"]) == (whole["id"], "in_progress", SAID[:4])
    else:
        assert (second.status_code, whole["id"] in second.json()["error"]["message"]) == (504, True)


async def test_a_request_that_failed_is_carried_out_again_under_its_key(responses: Responses) -> None:
    responses.engine.failures[0] = (0, RuntimeFailed("x"))
    key = {"Idempotency-Key": "k"}
    await responses.refused(500, "POST", json={"input": "Hi"}, headers=key)
    assert (await responses.make(headers=key))["status"] == "completed"


@pytest.mark.parametrize(("content", "status"), [("Hi", 200), ("Ho", 409)])
async def test_two_processes_make_one_response_for_a_key(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, quick_polls: None, content: str, status: int
) -> None:
    """The second process makes its response after the first one has read that the key is new."""
    redis_server.client.flushall()
    monkeypatch.setenv(STATES_PASSWORD, PASSWORD)
    key, made, loop = {"Idempotency-Key": "k"}, list[dict[str, Any]](), asyncio.get_running_loop()
    async with service(states=redis_server.url) as first, service(states=redis_server.url) as second:
        store: Any = first.engine.states
        write_all = store._engine.write_all

        def write_late(*given: Any) -> Any:
            if not made:
                made.append(asyncio.run_coroutine_threadsafe(second.make(headers=key, input=content), loop).result(PATIENCE_S))
            return write_all(*given)

        monkeypatch.setattr(store._engine, "write_all", write_late)
        answer = await first.ask("POST", json={"input": "Hi"}, headers=key)
        assert (answer.status_code, answer.json().get("id")) == (status, made[0]["id"] if status == 200 else None)
        assert [each.id for each in await store.call(lambda engine: engine.documents("", "response", None, 5))] == [made[0]["id"]]


# Leaving ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.pool
async def test_a_client_that_leaves_cancels_its_response(quick_polls: None) -> None:
    async with service(FakeGenerator("wordy")) as responses:
        responses.engine.hold(4)
        asking = asyncio.create_task(responses.make())
        await so(lambda: responses.engine.runs and responses.engine.runs[0].usage.completion_tokens >= 4)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        store: Any = responses.engine.states
        (row,) = await store.call(lambda engine: engine.documents("", "response", None, 10))
        assert (await responses.ended(row.id))["status"] == "cancelled"
        assert responses.engine.runs[0].cancelled
        error: httpx.Response = await responses.ask("POST", f"/{row.id}/cancel")
        assert (error.status_code, error.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": 10**30}}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "f", "schema": {"maximum": 10**30}}}}, "text"),
        ({"guided_json": {"maximum": 10**30}, "background": True}, "guided_json"),
    ],
)
async def test_numbers_that_cannot_be_stored_are_refused(responses: Responses, fields: dict[str, Any], param: str) -> None:
    error = await responses.refused(400, "POST", json={"input": "Hi", **fields})
    assert (error["param"], "more than 64 bits" in error["message"]) == (param, True)


async def test_a_number_of_an_ignored_field_is_ignored_with_a_key_too(responses: Responses) -> None:
    part = b'{"type": "input_text", "text": "Hi", "logprobs": [NaN]}'
    body = b'{"input": [{"role": "user", "content": [%b]}]}' % part
    first, second = [await responses.http.post("/v1/responses", content=body, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert (first.status_code, second.json()) == (200, first.json())
