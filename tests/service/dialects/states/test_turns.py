"""States of completions, chat and responses: where a text begins, and what is kept after it."""

import json
from typing import Any

import pytest

from tests.service.dialects.states.conftest import ALICE, NO_STATE, States
from tests.service.fakes import client
from tests.service.generation_fakes import SAID, FakeGenerator, events, generator_app

pytestmark = pytest.mark.asyncio
SAYS = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say:", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [SAYS], "max_tokens": 100},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 100, "store": False},
}
FED = {  # what the routes feed for these bodies
    "/v1/completions": "<s>Say:",
    "/v1/chat/completions": "<s><user>Hi\n<assistant>",
    "/v1/responses": "<s><user>Hi\n<assistant>",
}
paths = pytest.mark.parametrize("path", BODIES)


async def post(states: States, path: str, **fields: Any) -> dict[str, Any]:
    answer = await states.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def refused(states: States, status: int, path: str, **fields: Any) -> dict[str, Any]:
    answer = await states.http.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@paths
async def test_nothing_is_kept_unless_asked_for(states: States, path: str) -> None:
    for nothing in ({}, {"store_state": False}, {"store_state": None, "state": None, "exact": None}):
        assert "state" not in await post(states, path, **nothing)
    assert states.engine.requests[0].keep is None
    assert (await states.done("GET"))["data"] == []


@paths
async def test_the_state_after_the_last_token_is_kept(states: States, path: str) -> None:
    answer = await post(states, path, store_state={"name": "turn", "pin": True, "metadata": {"a": "b"}, "ttl_s": 60})
    kept = await states.done("GET", "/turn")
    assert answer["state"] == {"object": "state", "id": kept["id"], "parent": None, "name": "turn", "expires": kept["expires"]}
    assert await states.text("turn") == FED[path] + SAID + "</s>"
    assert (kept["pinned"], kept["metadata"], kept["origin"]) == (True, {"a": "b"}, "prompt")
    assert kept["turn"] == ("" if path == "/v1/completions" else "generated")
    if "choices" in answer:
        assert answer["choices"][0]["state"] == answer["state"]


@pytest.mark.pool
@paths
async def test_the_last_event_of_a_stream_has_the_state(states: States, path: str) -> None:
    answer = await states.http.post(path, json={**BODIES[path], "stream": True, "store_state": True})
    told = [event for event in events(answer.text) if event != "[DONE]"]
    at = [number for number, event in enumerate(told) if '"state"' in json.dumps(event)]
    assert at == [len(told) - 1]
    last = told[-1].get("response", told[-1])
    assert (await states.done("GET"))["first_id"] == last["state"]["id"]


@pytest.mark.pool
async def test_a_stream_whose_state_was_deleted_is_read_again_to_its_end(states: States) -> None:
    answer = await states.http.post("/v1/completions", json={**BODIES["/v1/completions"], "stream": True, "store_state": True})
    await states.ask("DELETE", f"/{(await states.done('GET'))['first_id']}")
    *again, done = events((await states.http.get(f"/v1/stream/{answer.headers['x-run-id']}")).text)
    assert ("".join(event["choices"][0]["text"] for event in again), done) == (SAID, "[DONE]")
    assert '"state"' not in json.dumps(again)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_choice_has_a_state_of_its_own(states: States, path: str) -> None:
    answer = await post(states, path, n=3, store_state=True)
    ids = [choice["state"]["id"] for choice in answer["choices"]]
    assert "state" not in answer
    assert {each["id"] for each in (await states.done("GET"))["data"]} == set(ids)
    streamed = await states.http.post(path, json={**BODIES[path], "stream": True, "n": 2, "store_state": True})
    kept = [event["choices"][0] for event in events(streamed.text) if event != "[DONE]" and "state" in event["choices"][0]]
    assert sorted(choice["index"] for choice in kept) == [0, 1]
    assert (await refused(states, 400, path, n=2, store_state={"name": "both"}))["param"] == "store_state.name"


@paths
async def test_a_text_begins_at_a_state(states: States, path: str) -> None:
    first = await post(states, path, store_state={"name": "turn"})
    second = await post(states, path, state="turn", store_state={"name": "turn", "name_version": 1}, exact="best_effort")
    assert second["state"]["parent"] == first["state"]["id"]
    new = {"/v1/completions": "Say:"}.get(path, "\n<user>Hi\n<assistant>")
    assert states.model.decode(states.engine.requests[-1].prompt) == new
    assert states.engine.requests[-1].start == ("", first["state"]["id"], False, len((FED[path] + SAID).encode()) - 2 + 1)
    whole = FED[path] + SAID + "</s>" + new + SAID + "</s>"
    assert await states.text("turn") == whole
    by_id = await post(states, path, state=first["state"]["id"], store_state=True)
    assert await states.text(by_id["state"]["id"]) == whole
    assert (await states.done("GET", "/turn"))["names"] == [{"name": "turn", "version": 2}]


def usage_of(answer: dict[str, Any]) -> tuple[int, int, int, int]:
    """All tokens before the completion, those of them that were not computed, those of the completion, and all together."""
    usage = answer["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"], usage["total_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"], usage["total_tokens"]


@paths
async def test_usage_counts_all_tokens_of_the_context(states: States, path: str) -> None:
    """As OpenAI counts: those of the state are part of the prompt, and cached."""
    first = await post(states, path, store_state={"name": "turn"})
    fed, drawn = len(states.engine.requests[0].prompt), len(SAID.encode()) + 1
    assert usage_of(first) == (fed, 0, drawn, fed + drawn)
    second = await post(states, path, state="turn")
    position, new = fed + drawn, len(states.engine.requests[1].prompt)
    assert usage_of(second) == (position + new, position, drawn, position + new + drawn)
    child = await states.make("more", parent="turn")
    assert child["usage"] == {"prompt_tokens": position + 4, "cached_tokens": position}
    if path == "/v1/completions":
        both = await post(states, path, state="turn", prompt=["a", "bc"], n=2)
        assert usage_of(both)[:2] == (2 * position + 3, 2 * position)


async def test_tokens_of_a_state_are_charged_once() -> None:
    model = FakeGenerator("wordy")
    async with client(generator_app(model, api_keys=(ALICE,)), headers={"authorization": f"Bearer {ALICE}"}) as http:
        states = States(http, model)
        await states.make("x" * 99, name="doc")
        await post(states, "/v1/completions", prompt="abc", max_tokens=5, state="doc")
        assert (await http.get("/v1/usage")).json()["prompt_tokens"] == 100 + 3


async def test_an_end_of_turn_that_the_state_has_seen_is_not_fed_again(states: States) -> None:
    """The template ends a turn with a line break: here the model has drawn that too."""
    states.engine.script = "Ho\n"
    chat = await post(states, "/v1/chat/completions", max_tokens=3, store_state={"name": "turn"})
    assert chat["choices"][0]["finish_reason"] == "length"
    await states.done("POST", "/turn/fork", {"name": "fork"})  # a fork has no tokens of its own
    for name in ("turn", "fork"):
        await post(states, "/v1/chat/completions", state=name)
        assert states.model.decode(states.engine.requests[-1].prompt) == "<user>Hi\n<assistant>"


async def test_a_completion_can_draw_on_without_a_prompt(states: States) -> None:
    await states.make("Hello", name="doc")
    answer = await post(states, "/v1/completions", prompt="", state="doc")
    assert answer["choices"][0]["text"] == SAID
    assert states.engine.requests[-1].prompt == ()
    many = await post(states, "/v1/completions", prompt=["", "a"], state="doc", store_state=True)
    assert len({choice["state"]["id"] for choice in many["choices"]}) == 2


@pytest.mark.parametrize(
    ("path", "zero"),
    [("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_tokens"), ("/v1/chat/completions", "max_completion_tokens")],
)
async def test_a_prompt_is_kept_without_an_answer(states: States, path: str, zero: str) -> None:
    answer = await post(states, path, **{"max_tokens": None, zero: 0}, store_state={"name": "doc"})
    assert answer["usage"]["completion_tokens"] == 0
    assert await states.text("doc") == FED[path].removesuffix("<assistant>")
    assert (await states.done("GET", "/doc"))["turn"] == ("" if path == "/v1/completions" else "user")
    assert (await refused(states, 400, path, **{"max_tokens": None, zero: 0}))["param"] == zero


@pytest.mark.pool
@paths
async def test_a_state_that_cannot_be_continued_is_refused(states: States, path: str) -> None:
    assert (await refused(states, 404, path, state=NO_STATE))["param"] == "state"
    await states.make(name="doc")
    moved = await refused(states, 412, path, store_state={"name": "doc", "name_version": 0})
    assert (moved["code"], moved["param"]) == ("precondition_failed", "store_state.name_version")
    assert (await refused(states, 400, path, store_state={"name_version": 0}))["param"] == "store_state.name_version"
    assert (await refused(states, 400, path, store_state={"name": "a b"}))["param"].startswith("store_state")
    assert len(states.engine.requests) == 1
    if path == "/v1/completions":
        assert (await refused(states, 400, path, state="doc", echo=True))["param"] == "echo"
    if path != "/v1/responses":
        assert (await refused(states, 400, path, state="doc", prompt_logprobs=1))["param"] == "prompt_logprobs"


@paths
async def test_an_answer_from_other_arithmetic_says_so(states: States, path: str) -> None:
    """The arithmetic is that of the engine that has taken the run, not that of any replica."""
    await states.make(name="here")
    states.engine.compute_as("e15e")
    await states.make(name="doc")
    states.engine.compute_as("fa4e")
    for name, told in (("doc", "false"), ("here", None)):
        for stream in (False, True):
            body = {**BODIES[path], "state": name, "stream": stream, "exact": "best_effort"}
            assert (await states.http.post(path, json=body)).headers.get("x-state-exact") == told
    assert "x-state-exact" not in (await states.http.post(path, json={**BODIES[path], "state": "doc"})).headers
    child = await states.make("more", parent="doc", exact="best_effort")
    assert child["exact"] is False


@paths
async def test_a_state_names_its_model(path: str) -> None:
    model = FakeGenerator("wordy")
    async with client(generator_app(FakeGenerator("first"), model)) as http:
        states = States(http, model)
        await states.make(name="doc", model="wordy")
        assert (await post(states, path, state="doc"))["model"] == "wordy"
        assert (await refused(states, 400, path, state="doc", model="first"))["param"] == "model"


@paths
async def test_a_foreign_state_is_a_missing_one(keyed: tuple[States, States], path: str) -> None:
    mine, other = keyed
    made = await mine.make(name="doc")
    missing = await refused(other, 404, path, state=NO_STATE)
    assert await refused(other, 404, path, state=made["id"]) == await refused(other, 404, path, state="doc") == missing
    await post(other, path, store_state={"name": "doc"})
    assert (await mine.done("GET", "/doc"))["id"] == made["id"]


@pytest.mark.pool
async def test_a_failure_to_keep_fails_the_request() -> None:
    model = FakeGenerator("wordy")
    async with client(generator_app(model, max_state_bytes=1024)) as http:
        states = States(http, model)
        assert (await refused(states, 403, "/v1/completions", prompt="x" * 300, store_state=True))["code"] == "state_quota_exceeded"
        body = {"prompt": "x" * 300, "store_state": True, "stream": True}
        *_, last = events((await states.http.post("/v1/completions", json=body)).text)
        assert last["error"]["code"] == "state_quota_exceeded"


@pytest.mark.parametrize(
    ("store_state", "param", "told"),
    [
        ({"pin": 1}, "store_state.pin", "valid boolean. Given: 1"),
        ({"name": "a", "name_version": 1.5}, "store_state.name_version", "valid integer. Given: 1.5"),
        ({"metadata": {"a": 1}}, "store_state.metadata.a", "valid string. Given: 1"),
        ({"ttl_s": "60"}, "store_state.ttl_s", "a number of seconds from 1 to 3153600000, or 'never'. Given: '60'"),
        ({"ttl_s": True}, "store_state.ttl_s", "a number of seconds from 1 to 3153600000, or 'never'. Given: True"),
        (1, "store_state", "valid boolean. Given: 1"),
    ],
)
async def test_an_error_inside_store_state_names_the_field_inside(states: States, store_state: Any, param: str, told: str) -> None:
    answer = await states.http.post("/v1/completions", json={"prompt": "Hi", "store_state": store_state})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert told in error["message"]
