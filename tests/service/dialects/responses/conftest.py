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
from tests.service.fakes import PATIENCE_S, client
from tests.service.generation_fakes import FakeGenerator, events, generator_app

ALICE, BOB = "alice-0123456789", "bob-0123456789"
NO_RESPONSE = "resp_" + "0" * 32


async def so(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Responses:
    """`/v1/responses` as its clients use it."""

    def __init__(self, http: httpx.AsyncClient, app: Application, model: FakeGenerator) -> None:
        self.http, self.app, self.model, self.engine = http, app, model, model.engine

    @property
    def running(self) -> Running:
        return running_of(self.app.state.catalog)

    async def ask(self, method: str, path: str = "", json: Any = None, **options: Any) -> httpx.Response:
        return await self.http.request(method, f"/v1/responses{path}", json=json, **options)

    async def make(self, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """A response, whole."""
        answer = await self.ask("POST", json={"input": "Hi", **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    async def read(self, response: str) -> dict[str, Any]:
        answer = await self.ask("GET", f"/{response}")
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    async def refused(self, status: int, method: str, path: str = "", json: Any = None, **options: Any) -> dict[str, Any]:
        """The error of what must fail with this status."""
        answer = await self.ask(method, path, json, **options)
        assert answer.status_code == status, answer.text
        assert answer.headers.get("x-should-retry") == ("false" if status in (409, 412) else None)
        error: dict[str, Any] = answer.json()["error"]
        return error

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

    async def words(self, state: str) -> str:
        """Everything that a state has seen."""
        content = (await self.http.get(f"/v1/states/{state}/blob")).content
        return self.model.text_of(content)

    def later(self, seconds: float) -> None:
        """Have the store's clock be ahead."""
        store: Any = self.engine.states
        store._engine._clock = lambda: time.time() + seconds


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
    monkeypatch.setattr("service.dialects.openai.responses.live._PROGRESS_S", 0.0)
