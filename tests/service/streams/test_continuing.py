"""Streams that are continued after every one of their events: the same text, tokens and log-probabilities as undisturbed."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from service.states.sqlite import SqliteEngine
from service.states.store import Store
from tests.service.generation.conftest import tokenizer  # noqa: F401  # a fixture
from tests.service.stream_fakes import Answer, Event, gateway, parsed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "a prompt"
RANDOM = {"seed": 7, "temperature": 1.0, "top_k": 60, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"enum": [name, "abc"]}}}}}
    for name in ("one", "two")
]
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
    "schema": (CHAT, {"messages": MESSAGES, "max_tokens": 60, "guided_json": {"enum": [{"a": None}, {"b": [1, None]}]}, **RANDOM}),
}


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(SqliteEngine(None))
    yield made
    made.close()


@pytest.fixture
async def http(tokenizer: Path, store: Store) -> AsyncIterator[httpx.AsyncClient]:  # noqa: F811
    async with gateway(tokenizer, store) as made:
        yield made


async def begin(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, list[Event]]:
    """The id of a stream's run, and all its events."""
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-run-id"], parsed(answer.text)


async def forget_progress(store: Store, run: str, tokens: int) -> None:
    """Leave so many stored tokens of each choice, as if the owner had died."""

    def forget(engine: SqliteEngine) -> None:
        found = engine.read("", "run", run)
        fields = orjson.loads(found.body)
        import base64

        kept = [base64.b64decode(ids)[: 4 * tokens] for ids in fields["tokens"]]
        fields["tokens"] = [base64.b64encode(ids).decode() for ids in kept]
        fields["ended"], fields["status"] = [False] * len(kept), "in_progress"
        from dataclasses import replace

        from service.states.record import Quota

        engine.write(replace(found, body=orjson.dumps(fields)), None, Quota(10, 10**9))

    await store.call(forget)


@pytest.mark.parametrize("stored", [0, 3, 1000])
@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_goes_on_after_any_event(http: httpx.AsyncClient, store: Store, name: str, stored: int) -> None:
    path, body = BODIES[name]
    run, events = await begin(http, path, body)
    whole = Answer.of(events)
    assert whole.done
    assert all(event.id and event.id.startswith(f"{run}:") for event in events)
    assert events[0].retry == 1000
    for cut, event in enumerate(events[:-1], 1):
        if stored < 1000:
            await forget_progress(store, run, stored)
        rest = await http.post(path, json={**body, "stream": True}, headers={"last-event-id": event.id})
        assert rest.status_code == 200, rest.text
        assert rest.headers["x-run-id"] == run
        told = Answer.of([*events[:cut], *parsed(rest.text)])
        assert told == whole, f"{cut}: {event.id}\n{rest.text}"
