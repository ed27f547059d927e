"""A route that generates, as tests ask it: by hand, without a socket."""

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from service.app import Application
from service.generation.request import GenerationRequest
from tests.service.fakes import client
from tests.service.generation_fakes import SAID, FakeGenerator, events, generator_app

N_SAID = len(SAID.encode()) + 1  # a token a byte, and </s>
HI_PROMPT = "<s><user>Hi\n<assistant>"  # what the template makes of a user's "Hi"
N_HI_PROMPT = len(HI_PROMPT) - len("<s>") + 1  # a token a byte, and <s>


class Route:
    """One path of an application. Every request has the fields of `body`, and those of its own."""

    def __init__(self, http: httpx.AsyncClient, app: Application, model: FakeGenerator, path: str, body: Mapping[str, Any]) -> None:
        self.http, self.app, self.model, self.engine = http, app, model, model.engine
        self._path, self._body = path, body

    async def post(self, **fields: Any) -> httpx.Response:
        return await self.http.post(self._path, json={**self._body, **fields})

    async def whole(self, **fields: Any) -> dict[str, Any]:
        """The answer."""
        answer = await self.post(**fields)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    async def streamed(self, **fields: Any) -> list[Any]:
        """The events of the answer."""
        answer = await self.post(stream=True, **fields)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), answer.text
        return events(answer.text)

    async def request(self, **fields: Any) -> GenerationRequest:
        """What the engine is asked for."""
        self.engine.forget()
        await self.whole(**fields)
        (request,) = self.engine.requests
        return request

    async def prompt(self, **fields: Any) -> str:
        """The same, the prompt alone, as text."""
        return self.model.decode((await self.request(**fields)).prompt)


class Stored:
    """Routes under one path whose objects are in the store, as their clients use them."""

    path: str

    def __init__(self, http: httpx.AsyncClient, model: FakeGenerator) -> None:
        self.http, self.model, self.engine = http, model, model.engine

    async def ask(self, method: str, path: str = "", json: Any = None, **options: Any) -> httpx.Response:
        return await self.http.request(method, f"{self.path}{path}", json=json, **options)

    async def done(self, method: str, path: str = "", json: Any = None, **options: Any) -> dict[str, Any]:
        """The answer to what must succeed."""
        answer = await self.ask(method, path, json, **options)
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

    def later(self, seconds: float) -> None:
        """Have the store's clock be ahead."""
        store: Any = self.engine.states
        store._engine._clock = lambda: time.time() + seconds  # the service opens its store itself, by a setting

    async def text(self, state: str) -> str:
        """Everything that a state has seen."""
        content = (await self.http.get(f"/v1/states/{state}/blob")).content
        return self.model.text_of(content)


async def expect_refusals(service: Route, rows: Iterable[tuple[dict[str, Any], str, str]]) -> None:
    """Send the fields of each row: OpenAI's error must name the parameter and have the words, and nothing must run."""
    for fields, param, message in rows:
        answer = await service.post(**fields)
        error = answer.json().get("error")
        assert (answer.status_code in (400, 404), error["type"], error["param"]) == (True, "invalid_request_error", param), (fields, error)
        assert message in error["message"], (fields, error)
        assert not service.engine.runs, fields


@asynccontextmanager
async def route(path: str, body: Mapping[str, Any], model: FakeGenerator, *others: FakeGenerator, **settings: Any) -> AsyncIterator[Route]:
    """A route of an application that has these models; the first is asked."""
    app = generator_app(model, *others, **settings)
    async with client(app) as http:
        yield Route(http, app, model, path, body)
