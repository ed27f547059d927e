"""`/tokenize` and `/detokenize` in vLLM's form, beside text-embeddings-inference's `/tokenize` at the same path."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.service.fakes import client
from tests.service.generation_fakes import BOS, FakeGenerator, generator_app

HI = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client(generator_app(FakeGenerator("wordy"), FakeGenerator("mute", template=None))) as made:
        yield made


@pytest.fixture
def http(shared: httpx.AsyncClient) -> httpx.AsyncClient:
    return shared


def ids(text: str) -> list[int]:
    return FakeGenerator("x").encode(text, add_special_tokens=False)


async def test_prompts_and_conversations_become_tokens_and_come_back(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], list[int]]] = [
        ({"prompt": "hé"}, [BOS, *ids("hé")]),
        ({"prompt": "hé", "add_special_tokens": False}, ids("hé")),
        ({"prompt": "x" * 10_000}, [BOS, *ids("x" * 10_000)]),
        ({"messages": HI}, [BOS, *ids("<user>Hi\n<assistant>")]),
        ({"messages": HI, "add_generation_prompt": False}, [BOS, *ids("<user>Hi\n")]),
    ]
    for body, tokens in rows:
        answer = (await http.post("/tokenize", json={"model": "wordy", **body})).json()
        assert answer == {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens, "token_strs": None}
        text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
        assert text == {"prompt": FakeGenerator("x").decode(tokens)}


async def test_token_strings_are_those_of_the_vocabulary(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"prompt": "a é", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["<s>", "a", "Ġ", "Ã", "©"]


async def test_what_is_wrong_is_refused_in_openais_form(http: httpx.AsyncClient) -> None:
    rows: list[tuple[str, dict[str, Any], str, str]] = [
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages", "cannot be combined"),
        ("/tokenize", {"prompt": "a", "inputs": "b"}, "inputs", "is not a parameter"),
        ("/tokenize", {"messages": HI, "model": "mute"}, "model", "no chat template"),
        ("/tokenize", {"messages": [], "model": "wordy"}, "messages", "cannot be empty"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "writes its own"),
        ("/detokenize", {}, "tokens", "Field required"),
        ("/detokenize", {"tokens": [258]}, "tokens", "outside this model's vocabulary"),
        ("/detokenize", {"tokens": [1], "text": "x"}, "text", "is not a parameter"),
    ]
    for path, body, param, message in rows:
        answer = await http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), body
        assert message in error["message"], body


async def test_the_other_body_is_the_other_dialects(http: httpx.AsyncClient) -> None:
    """Its model reads texts as a whole, and its errors have its form."""
    for body in ({"inputs": "a"}, {"inputs": "a", "prompt": "", "messages": []}, {}):
        answer = await http.post("/tokenize", json=body)
        assert set(answer.json()) == {"error", "error_type"}
