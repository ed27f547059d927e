"""An application with one decoder, wordy, whose states are the ids of all tokens."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio

from tests.service.dialects.asking import Stored
from tests.service.fakes import client
from tests.service.generation_fakes import FakeGenerator, generator_app

ALICE, BOB = "alice-0123456789", "bob-0123456789"
NO_STATE = "state_" + "0" * 32


class States(Stored):
    """`/v1/states` as its clients use it."""

    path = "/v1/states"

    async def make(self, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
        headers = fields.pop("headers", None)
        return await self.done("POST", json={"prompt": prompt, **fields}, headers=headers)


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
