"""A route that generates, as tests ask it: by hand, without a socket."""

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
