"""`/v1/responses` with a store: by hand, and by OpenAI's own client."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from service.app import Application
from service.dialects.openai.responses.running import Running, running_of
from service.streams.lease import Leases
from tests.service.dialects.asking import Stored
from tests.service.fakes import PATIENCE_S, client
from tests.service.generation_fakes import FakeGenerator, events, generator_app

ALICE, BOB = "alice-0123456789", "bob-0123456789"
NO_RESPONSE = "resp_" + "0" * 32


async def so(condition: Callable[[], object]) -> None:
    """Wait until something is so, and leave the threads of the store their time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Responses(Stored):
    """`/v1/responses` as its clients use it."""

    path = "/v1/responses"

    def __init__(self, http: httpx.AsyncClient, app: Application, model: FakeGenerator) -> None:
        super().__init__(http, model)
        self.app = app

    @property
    def running(self) -> Running:
        return running_of(self.app.state.catalog)

    @property
    def leases(self) -> Leases:
        found: Leases = self.app.state.catalog.leases
        return found

    async def make(self, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """A response, whole."""
        return await self.done("POST", json={"input": "Hi", **fields}, headers=headers)

    async def read(self, response: str) -> dict[str, Any]:
        return await self.done("GET", f"/{response}")

    async def streamed(self, response: str, **query: Any) -> list[Any]:
        """The events of a stored response."""
        answer = await self.ask("GET", f"/{response}", params={"stream": "true", **query})
        assert answer.status_code == 200, answer.text
        return events(answer.text) if "data: " in answer.text else []

    async def until(self, condition: Callable[[dict[str, Any]], object], response: str) -> dict[str, Any]:
        """Poll a response until something about it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(found := await self.read(response)):
            assert time.monotonic() < deadline, str(found)
            await asyncio.sleep(0.01)
        return found

    async def ended(self, response: str) -> dict[str, Any]:
        return await self.until(lambda found: found["status"] not in ("queued", "in_progress"), response)


@asynccontextmanager
async def service(
    model: FakeGenerator | None = None, *, headers: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Responses]:
    """An application with one decoder, wordy, whose states are the ids of all tokens."""
    made = model or FakeGenerator("wordy")
    app = generator_app(made, default_max_tokens=64, **settings)
    async with client(app, headers=headers) as http:
        yield Responses(http, app, made)


@pytest_asyncio.fixture
async def responses() -> AsyncIterator[Responses]:
    async with service() as made:
        yield made


@pytest_asyncio.fixture
async def keyed() -> AsyncIterator[tuple[Responses, Responses]]:
    """The same service for two tenants."""
    async with service(headers={"authorization": f"Bearer {ALICE}"}, api_keys=(ALICE, BOB)) as mine:
        transport, bob = httpx.ASGITransport(mine.app), {"authorization": f"Bearer {BOB}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://attnserve", headers=bob) as other:
            yield mine, Responses(other, mine.app, mine.model)


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that another process writes are looked at often."""
    monkeypatch.setattr("service.dialects.openai.responses.stream_source._POLL_S", 0.01)
    monkeypatch.setattr("service.dialects.openai.responses.stored._PROGRESS_S", 0.0)
