"""The same routes before a real decoder: its states give the tokens that the whole text gives, to the last digit."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from service.app import build_app
from service.catalog import Catalog
from service.settings import Settings
from tests.service.fakes import PATIENCE_S

pytestmark = pytest.mark.asyncio
TEXT = "def mean(values):\n    total = 0\n"


@pytest.fixture(scope="module", autouse=True)
def where() -> None:
    """A real engine in this process."""


@pytest_asyncio.fixture
async def http(decoder_bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    catalog = Catalog(Settings(bundles=(decoder_bundle,), threads=1))
    app = build_app(catalog)
    async with app.router.lifespan_context(app):
        await catalog.warm.wait()
        assert catalog.failure is None
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://attnserve", timeout=PATIENCE_S) as made:
            yield made


async def done(http: httpx.AsyncClient, method: str, path: str, json: Any = None) -> Any:
    answer = await http.request(method, path, json=json)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_state_whose_numbers_overflow_is_the_clients_error_and_nothing_is_kept_after_it(http: httpx.AsyncClient) -> None:
    made = await done(http, "POST", "/v1/states", {"prompt": TEXT})
    content = bytearray((await http.get(f"/v1/states/{made['id']}/blob")).content)
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    first, end = header["state_0_S"]["data_offsets"]
    content[begin + first : begin + end] = np.full((end - first) // 4, 3e38, "<f4").tobytes()  # finite, so it is accepted
    answer = await http.put("/v1/states/blob", content=bytes(content), headers={"content-type": "application/octet-stream"})
    assert answer.status_code == 200, answer.text
    broken, kept = answer.json()["id"], len((await done(http, "GET", "/v1/states"))["data"])
    for path, body, param in (
        ("completions", {"prompt": TEXT, "max_tokens": 2, "state": broken}, "state"),
        ("completions", {"prompt": TEXT, "max_tokens": 0, "state": broken, "store_state": True}, "state"),
        ("states", {"prompt": TEXT, "parent": broken}, "parent"),
    ):
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["param"] == param
        assert "not finite" in answer.json()["error"]["message"]
    assert len((await done(http, "GET", "/v1/states"))["data"]) == kept
