"""The same routes before a real decoder: its states give the tokens that the whole text gives, to the last digit."""

import asyncio
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
DRAWING = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 3, "frequency_penalty": 0.5, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def where() -> None:
    """A real engine in this process."""


@pytest_asyncio.fixture
async def http(decoder_bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    failed = asyncio.Event()
    catalog = Catalog(Settings(bundles=(decoder_bundle,), threads=1))
    app = build_app(catalog, on_failure=failed.set)
    async with app.router.lifespan_context(app):
        await catalog.warm.wait()
        assert catalog.failure is None
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://attnserve", timeout=PATIENCE_S) as made:
            yield made


async def done(http: httpx.AsyncClient, method: str, path: str, json: Any = None) -> Any:
    answer = await http.request(method, path, json=json)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def drawn(http: httpx.AsyncClient, prompt: str, **fields: Any) -> Any:
    """Text and log-probabilities of a completion."""
    (choice,) = (await done(http, "POST", "/v1/completions", {"prompt": prompt, **DRAWING, **fields}))["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


async def tensors(http: httpx.AsyncClient, state: str) -> bytes:
    """The tensors of a state, without what says where it comes from."""
    answer = await http.get(f"/v1/states/{state}/blob")
    assert answer.status_code == 200, answer.text
    content = answer.content
    return content[8 + int.from_bytes(content[:8], "little") :]


async def test_what_was_kept_after_a_completion_continues_it(http: httpx.AsyncClient) -> None:
    body = {"prompt": TEXT, **DRAWING, "temperature": 0, "store_state": True}
    first = await done(http, "POST", "/v1/completions", body)
    state = first["state"]["id"]
    fed = len((await done(http, "POST", "/tokenize", {"prompt": TEXT, "model": "tiny-decoder"}))["tokens"])
    assert (await done(http, "GET", f"/v1/states/{state}"))["position"] == fed + 12
    ids = await done(http, "POST", "/v1/completions", {**body, "max_tokens": 20, "frequency_penalty": 0, "logprobs": None})
    part = await done(http, "POST", "/v1/completions", {**body, "frequency_penalty": 0, "logprobs": None})
    rest = await done(
        http,
        "POST",
        "/v1/completions",
        {**body, "prompt": "", "max_tokens": 8, "frequency_penalty": 0, "logprobs": None, "state": part["state"]["id"]},
    )
    assert part["choices"][0]["text"] + rest["choices"][0]["text"] == ids["choices"][0]["text"]
    assert rest["usage"]["prompt_tokens"] == rest["usage"]["prompt_tokens_details"]["cached_tokens"] == fed + 12


async def test_a_chat_continues_from_its_state(http: httpx.AsyncClient) -> None:
    options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    said = [{"role": "user", "content": "Hi"}]
    first = await done(http, "POST", "/v1/chat/completions", {"messages": said, **options, "store_state": {"name": "chat"}})
    answer = first["choices"][0]["message"]["content"]
    new = [{"role": "user", "content": "And?"}]
    whole = await done(
        http, "POST", "/v1/chat/completions", {"messages": [*said, {"role": "assistant", "content": answer}, *new], **options}
    )
    short = await done(http, "POST", "/v1/chat/completions", {"messages": new, "state": "chat", **options})
    if "\ufffd" not in answer:  # else the text is not what the state has seen
        assert short["choices"][0]["message"] == whole["choices"][0]["message"]
    assert short["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]


async def ids(http: httpx.AsyncClient) -> list[int]:
    tokens: list[int] = (await done(http, "POST", "/tokenize", {"prompt": TEXT, "model": "tiny-decoder"}))["tokens"]
    return tokens


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
