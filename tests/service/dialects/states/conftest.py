"""An application with one decoder, wordy, whose states are the ids of all tokens."""

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio

from tests.service.fakes import client
from tests.service.generation_fakes import FakeGenerator, generator_app

ALICE, BOB = "alice-0123456789", "bob-0123456789"
NO_STATE = "state_" + "0" * 32


class States:
    """`/v1/states` as its clients use it."""

    def __init__(self, http: httpx.AsyncClient, model: FakeGenerator) -> None:
        self.http, self.model, self.engine = http, model, model.engine

    async def ask(self, method: str, path: str = "", json: Any = None, **options: Any) -> httpx.Response:
        return await self.http.request(method, f"/v1/states{path}", json=json, **options)

    async def done(self, method: str, path: str = "", json: Any = None, **options: Any) -> dict[str, Any]:
        """The answer to what must succeed."""
        answer = await self.ask(method, path, json, **options)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    async def make(self, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
        headers = fields.pop("headers", None)
        return await self.done("POST", json={"prompt": prompt, **fields}, headers=headers)

    async def refused(self, status: int, method: str, path: str = "", json: Any = None, **options: Any) -> dict[str, Any]:
        """The error of what must fail with this status."""
        answer = await self.ask(method, path, json, **options)
        assert answer.status_code == status, answer.text
        assert answer.headers.get("x-should-retry") == ("false" if status in (409, 412) else None)
        error: dict[str, Any] = answer.json()["error"]
        return error

    def later(self, seconds: float) -> None:
        """Have the store's clock be ahead."""
        store: Any = self.engine.states
        store._engine._clock = lambda: time.time() + seconds

    async def text(self, state: str) -> str:
        """Everything that a state has seen."""
        content = (await self.ask("GET", f"/{state}/blob")).content
        return self.model.text_of(content)


@pytest_asyncio.fixture
async def states() -> AsyncIterator[States]:
    model = FakeGenerator("wordy")
    async with client(generator_app(model)) as http:
        yield States(http, model)


@pytest_asyncio.fixture
async def keyed() -> AsyncIterator[tuple[States, States]]:
    """The same service for two tenants."""
    model = FakeGenerator("wordy")
    app = generator_app(model, api_keys=(ALICE, BOB))
    transport, bob = httpx.ASGITransport(app), {"authorization": f"Bearer {BOB}"}
    async with (
        client(app, headers={"authorization": f"Bearer {ALICE}"}) as http,
        httpx.AsyncClient(transport=transport, base_url="http://attnserve", headers=bob) as other,
    ):
        yield States(http, model), States(other, model)
