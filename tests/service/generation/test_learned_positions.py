"""A decoder with as many positions as it has learned, served: what a text may be long, and how one ends that is at its last position."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from service.app import build_app
from service.catalog import Catalog
from service.settings import Settings
from tests.decoders import tiny_decoder_bundle

N_POSITIONS = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learned") / "bundle"
    return tiny_decoder_bundle(path, layers=("causal_linear", "sliding_window"), n_layers=2, positions="learned", n_positions=N_POSITIONS)


@pytest.fixture
async def http(bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    catalog = Catalog(Settings(bundles=(bundle,), threads=1))
    await asyncio.to_thread(catalog.load)  # which feeds the golden prompts
    catalog.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(catalog)), base_url="http://attnserve") as client:
        yield client
    await catalog.stop()


async def test_a_text_ends_at_the_last_position_whoever_is_beside_it(http: httpx.AsyncClient) -> None:
    """Alone and in a batch of prompts of all lengths, whose padding stands behind the last position. A byte is a token."""

    async def completed(n: int) -> tuple[str, str, int]:
        body = {"model": "tiny-decoder", "prompt": "a" * n, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]

    sizes = (1, 17, 39, N_POSITIONS)
    together = await asyncio.gather(*map(completed, sizes))
    assert [answer[1:] for answer in together] == [("length", N_POSITIONS - n + 1) for n in sizes]
    assert together == [await completed(n) for n in sizes]


async def test_a_longer_prompt_is_refused_with_both_numbers(http: httpx.AsyncClient) -> None:
    body = {"model": "tiny-decoder", "prompt": "a" * (N_POSITIONS + 1), "max_tokens": 1}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the prompt has 41 tokens, and this model's maximum context length is 40 tokens: shorten it"
    tokens = (await http.post("/tokenize", json={"model": "tiny-decoder", "prompt": "a"})).json()
    assert tokens["max_model_len"] == N_POSITIONS
