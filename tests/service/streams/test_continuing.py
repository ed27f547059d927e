"""Streams that are continued after every one of their events: the same text, tokens and log-probabilities as undisturbed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.generation import runs
from service.states.engine import StateEngine
from service.states.record import Quota
from service.states.store import Store
from service.streams.record import REQUEST_KIND, RUN_KIND, Progress, pack, unpack
from tests.service.stream_fakes import Answer, Event, gateway, parsed

ROOM = Quota(10, 10**9)
_MANY = 12
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "a prompt"
RANDOM = {"seed": 7, "temperature": 1.0, "top_k": 60, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"enum": [name, "abc"]}}}}}
    for name in ("one", "two")
]
CALLS = r'[a-c]{3}(<tool_call>\{"name": "(one|two)", "arguments": \{"x": "[a-z]{2}"\}\}</tool_call>){2}'
USAGE = {"stream_options": {"include_usage": True}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9}),
    "two": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 6, "n": 2, **RANDOM, **USAGE}),
    "prompts": (COMPLETIONS, {"prompt": [PROMPT, "another"], "max_tokens": 4, "n": 2, **RANDOM}),
    "stop": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "stop": ["k", "zzz", "e"], "min_tokens": 4, "n": 2, **RANDOM}),
    "ids": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "stop_token_ids": list(range(40, 60)), **RANDOM}),
    "grammar": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 40, "guided_regex": "([a-z]{3} ){4}", "n": 2, **RANDOM}),
    "logprobs": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 7, "logprobs": 2, "n": 2, **RANDOM, **USAGE}),
    "echo": (COMPLETIONS, {"prompt": [PROMPT, "b"], "max_tokens": 3, "echo": True, "n": 2, **RANDOM}),
    "echo_logprobs": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "echo": True, "logprobs": 1, "n": 2, **RANDOM}),
    "nothing": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0, "echo": True}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2, **RANDOM, **USAGE}),
    "tool": (CHAT, {"messages": MESSAGES, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required", "n": 2, **RANDOM}),
    "calls": (CHAT, {"messages": MESSAGES, "max_tokens": 120, "tools": TOOLS, "guided_regex": CALLS, **RANDOM}),
    "schema": (CHAT, {"messages": MESSAGES, "max_tokens": 60, "guided_json": {"enum": [{"a": None}, {"b": [1, None]}]}, **RANDOM}),
}


async def begin(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, list[Event]]:
    """The id of a stream's run, and all its events."""
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-run-id"], parsed(answer.text)


async def forget_progress(store: Store, run: str, tokens: int, *, ended: bool = False) -> None:
    """Leave so many stored tokens of each choice, as if the owner had died, or as if the text had `ended` at its deadline."""

    def forget(engine: StateEngine) -> None:
        found, request = engine.read("", RUN_KIND, run), engine.read("", REQUEST_KIND, run)
        start, progress = unpack(run, "", found.body, request.body)
        left = Progress(tokens=[ids[:tokens] for ids in progress.tokens], ended=[ended] * len(progress.tokens))
        engine.write(replace(found, body=pack(start, left, "")), None, ROOM)

    await store.call(forget)


@pytest.mark.parametrize("stored", [0, 3, 1000])
@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_goes_on_after_any_event(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch, name: str, stored: int
) -> None:
    path, body = BODIES[name]
    run, events = await begin(http, path, body)
    whole = Answer.of(events)
    assert whole.done
    assert all(event.id and event.id.startswith(f"{run}:") for event in events)
    assert events[0].retry == 1000
    if not stored:  # what is computed again arrives in larger pieces than the client has
        monkeypatch.setattr(runs, "_PIECE_TOKENS", 256)
    for cut, event in enumerate(events[:-1], 1):
        if _MANY < cut < len(events) - _MANY and cut % 7:  # of a long stream, some of its middle
            continue
        if stored < 1000:
            await forget_progress(store, run, stored)
        rest = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": event.id})
        assert rest.status_code == 200, rest.text
        assert rest.headers["x-run-id"] == run
        told = Answer.of([*events[:cut], *parsed(rest.text)])
        assert told == whole, f"{cut}: {event.id}\n{rest.text}"


async def test_a_run_can_be_asked_for_by_its_id_alone(http: httpx.AsyncClient) -> None:
    run, events = await begin(http, *BODIES["two"])
    whole = Answer.of(events)
    for query in ("", "?from=0", "?starting_after=0"):
        told = parsed((await http.get(f"/v1/stream/{run}{query}")).text)
        assert (told[0].id, told[0].data, told[0].retry) == (f"{run}:0,0", None, 1000), "an event with an id and no data"
        assert Answer.of(told) == whole
    event = events[3]
    told = parsed((await http.get(f"/v1/stream/{run}", headers={"last-event-id": event.id or ""})).text)
    assert told[0].id == event.id
    assert Answer.of([*events[:4], *told]) == whole


@pytest.mark.parametrize("name", ["plain", "two"])
async def test_llama_cpps_from_counts_tokens(http: httpx.AsyncClient, name: str) -> None:
    path, body = BODIES[name]
    run, events = await begin(http, path, {**body, "seed": 7})  # whose first token is a whole character
    whole = Answer.of(events).choices
    most = max(int(event.id.split(":")[1].split(",")[0].rstrip("e")) for event in events if event.id)
    for tokens in range(most + 1):
        rest = Answer.of(parsed((await http.get(f"/v1/stream/{run}?from={tokens}")).text))
        assert rest.done
        for index, choice in rest.choices.items():
            assert whole[index]["text"].endswith(choice["text"])
            assert choice["finish_reason"] == whole[index]["finish_reason"]
        assert (rest.choices == whole) == (tokens == 0)


async def test_a_text_that_differs_from_the_clients_is_never_sent(http: httpx.AsyncClient, store: Store) -> None:
    path, body = BODIES["logprobs"]
    run, events = await begin(http, path, body)
    event = events[4].id or ""
    other = event[:-1] + ("0" if event[-1] != "0" else "1")
    for stored in (1000, 0):
        await forget_progress(store, run, stored)
        answer = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": other})
        (refused,) = parsed(answer.text)
        assert refused.data["error"]["code"] == "diverged"
    answer = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": event})
    assert Answer.of([*events[:5], *parsed(answer.text)]) == Answer.of(events), "it can still be continued with the right id"


async def test_tokens_that_are_known_are_charged_as_a_prompt_and_not_as_an_answer_again(tokenizer: Path, store: Store) -> None:
    path, body = BODIES["plain"]
    headers = {"authorization": "Bearer a-secret-key"}
    async with gateway(tokenizer, store, api_keys=("a-secret-key",)) as http:
        answer = await http.post(path, json={**body, "stream": True, "ignore_eos": True}, headers=headers)
        once = (await http.get("/v1/usage", headers=headers)).json()
        await http.get(f"/v1/stream/{answer.headers['x-run-id']}?from=4", headers=headers)
        twice = (await http.get("/v1/usage", headers=headers)).json()
    assert once["completion_tokens"] == 9
    assert twice["completion_tokens"] == 9 + 5
    assert twice["prompt_tokens"] == 2 * once["prompt_tokens"] + 4


async def test_other_arithmetic_must_prove_what_the_client_has(http: httpx.AsyncClient, store: Store, tokenizer: Path) -> None:
    path, body = BODIES["two"]
    run, events = await begin(http, path, body)
    async with gateway(tokenizer, store, numerics="elsewhere") as other:
        answer = await other.post(path, json={**body, "stream": True}, headers={"last-event-id": events[4].id or ""})
        assert Answer.of([*events[:5], *parsed(answer.text)]) == Answer.of(events)
        assert (await other.get(f"/v1/stream/{run}?from=2")).json()["error"]["code"] == "diverged"
        assert Answer.of(parsed((await other.get(f"/v1/stream/{run}?from=0")).text)).done
        other.model.steps.embedding += 1  # type: ignore[attr-defined]  # now it draws other tokens
        answer = await other.post(path, json={**body, "stream": True}, headers={"last-event-id": events[8].id or ""})
        (refused,) = parsed(answer.text)
        assert refused.data["error"]["code"] == "diverged"


async def test_what_cannot_be_continued_is_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    run, events = await begin(http, *BODIES["two"])
    other = f"run_{'0' * 32}"
    for path in (f"/v1/stream/{other}", "/v1/stream/x"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "run_not_found")

    async def refused(path: str, body: dict[str, Any], event: str) -> str:
        answer = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": event})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    path, body = BODIES["two"]
    assert "is not the id of an event" in await refused(path, body, "17")
    assert "the position is of 3 choices, and the run has 2" in await refused(path, body, f"{run}:0,0,0")
    assert f"is one of {path}" in await refused(*BODIES["chat"], events[1].id or "")
    answer = await http.get(f"/v1/stream/{other}", headers={"last-event-id": events[1].id or ""})
    assert "and the path is of" in answer.json()["error"]["message"]
    path, body = BODIES["plain"]
    assert (await http.post(path, json=body, headers={"last-event-id": "17"})).status_code == 200, "a whole answer has no events"


async def test_a_stream_that_ended_at_its_deadline_is_read_again_to_the_same_token(http: httpx.AsyncClient, store: Store) -> None:
    run, _ = await begin(http, *BODIES["two"])
    await forget_progress(store, run, 3, ended=True)
    again = parsed((await http.get(f"/v1/stream/{run}")).text)
    assert (again[-1].tokens, again[-1].data) == ([3, 3], "[DONE]")
    assert [choice["finish_reason"] for choice in Answer.of(again).choices.values()] == ["length", "length"]


async def test_a_position_beyond_the_stream_is_refused_with_its_length(http: httpx.AsyncClient, store: Store) -> None:
    path, body = BODIES["grammar"]
    run, events = await begin(http, path, body)
    for most in (events[-1].tokens[0], body["max_tokens"]):  # of a stream that has ended, and of one that has not
        for param, query, headers in (("from", "?from=99999", {}), ("last-event-id", "", {"last-event-id": f"{run}:{most + 1},0"})):
            answer = await http.get(f"/v1/stream/{run}{query}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert f"tokens of choice 0, which has {most} at most" in answer.json()["error"]["message"]
        await forget_progress(store, run, 3)


async def test_a_client_that_comes_back_while_the_models_are_loaded_is_told_to_wait(tokenizer: Path, store: Store) -> None:
    """Not that there is no such run, after which it would give up."""
    path, body = BODIES["two"]
    async with gateway(tokenizer, store) as http:
        run, events = await begin(http, path, body)
        catalog = http.app.state.catalog  # type: ignore[attr-defined]
        models, catalog.models, catalog.states, catalog._leases = catalog.models, {}, None, None
        headers = {"last-event-id": events[2].id or ""}
        for early in (
            await http.post(path, json={**body, "stream": True}, headers=headers),
            await http.get(f"/v1/stream/{run}", headers=headers),
        ):
            assert (early.status_code, early.json()["error"]["message"]) == (503, "the models are still being loaded")
            assert early.headers["retry-after"]
        catalog.models, catalog.states = models, store
        rest = await http.post(path, json={**body, "stream": True}, headers=headers)
        assert Answer.of([*events[:3], *parsed(rest.text)]).choices == Answer.of(events).choices
