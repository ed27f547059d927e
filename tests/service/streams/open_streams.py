"""Streams that are read while they are sent, and what the store has of them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from service.states.record import Document
from service.states.store import Store
from service.streams.lease import Leases
from service.streams.record import RUN_KIND
from tests.service.fakes import app_of, until
from tests.service.http.test_edge import Caller
from tests.service.stream_fakes import Answer, Event, RealGenerator, parsed

PATH = "/v1/completions"
BODY = {"prompt": "a prompt", "max_tokens": 12, "seed": 3, "stream": True}

RUN: dict[str, Any] = {
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


class OpenStream(Caller):
    """A stream that is read while it is sent, by a client that can go away."""

    def __init__(self, http: httpx.AsyncClient, key: str = "", **fields: Any) -> None:
        super().__init__(app_of(http), path=PATH, headers={"authorization": f"Bearer {key}"} if key else None)
        self.body(json.dumps({**BODY, **fields}).encode())

    @property
    def run(self) -> str:
        return str(dict(self.sent[0]["headers"])[b"x-run-id"].decode())

    @property
    def events(self) -> list[Event]:
        return parsed(b"".join(message["body"] for message in self.sent[1:]).decode())

    @property
    def complete(self) -> bool:
        return not self.sent[-1].get("more_body", False)

    async def leave(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def leases_of(http: httpx.AsyncClient) -> Leases:
    found = app_of(http).state.catalog.leases
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


async def begun(http: httpx.AsyncClient, tokens: int = 3, **fields: Any) -> OpenStream:
    """A stream whose engine stands still after so many tokens of each choice, all of which were sent."""
    steps = model_of(http).steps
    steps.hold()
    steps.release(tokens)  # the prompt, and all tokens but the last, which is sent before it is fed
    stream = OpenStream(http, **fields)
    await until(lambda: len(stream.sent) > 1 and stream.events and set(stream.events[-1].tokens) == {tokens})
    return stream


@asynccontextmanager
async def held(http: httpx.AsyncClient, tokens: int = 3, **fields: Any) -> AsyncIterator[OpenStream]:
    """The same, until the end of the block."""
    stream = await begun(http, tokens, **fields)
    try:
        yield stream
    finally:
        model_of(http).steps.open()
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
