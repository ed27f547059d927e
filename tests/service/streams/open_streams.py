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
from tests.service.fakes import PATIENCE_S, until
from tests.service.http.test_sse import _SCOPE
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


class OpenStream:
    """A stream that is read while it is sent, by a client that can go away."""

    def __init__(self, http: httpx.AsyncClient, key: str = "", **fields: Any) -> None:
        self.messages: list[Any] = []
        self.error: BaseException | None = None
        app: Any = http.app  # type: ignore[attr-defined]
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps({**BODY, **fields}).encode(), "more_body": False})
        scope = {**_SCOPE, "headers": [*_SCOPE["headers"], *([(b"authorization", b"Bearer " + key.encode())] if key else [])]}
        self.task = asyncio.create_task(app({**scope, "path": PATH, "raw_path": PATH.encode()}, self.incoming.get, self._send))

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
