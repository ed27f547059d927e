"""`/tokenize` and `/detokenize` in vLLM's form, beside text-embeddings-inference's `/tokenize` at the same path."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.service.fakes import client
from tests.service.generation_fakes import BOS, FakeGenerator, generator_app

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client(generator_app(FakeGenerator("wordy"), FakeGenerator("mute", template=None))) as made:
        yield made


def ids(text: str) -> list[int]:
    return FakeGenerator("x").encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [BOS, *ids("hé")]),
        ({"prompt": "hé", "add_special_tokens": False}, ids("hé")),
        ({"prompt": "x" * 10_000}, [BOS, *ids("x" * 10_000)]),
        ({"messages": HI}, [BOS, *ids("<user>Hi\n<assistant>")]),
        ({"messages": HI, "add_generation_prompt": False}, [BOS, *ids("<user>Hi\n")]),
    ],
)
async def test_prompts_and_conversations_become_tokens_and_come_back(http: httpx.AsyncClient, body: Any, tokens: list[int]) -> None:
    answer = (await http.post("/tokenize", json={"model": "wordy", **body})).json()
    assert answer == {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens, "token_strs": None}
    text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert text == {"prompt": FakeGenerator("x").decode(tokens)}


async def test_token_strings_are_those_of_the_vocabulary(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"prompt": "a é", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["<s>", "a", "Ġ", "Ã", "©"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages", "cannot be combined"),
        ("/tokenize", {"prompt": 5}, "prompt", "valid string"),
        ("/tokenize", {"prompt": "a", "inputs": "b"}, "inputs", "is not a parameter"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens", "valid boolean"),
        ("/tokenize", {"prompt": "a", "model": "huge"}, "model", "does not exist"),
        ("/tokenize", {"messages": HI, "model": "mute"}, "model", "no chat template"),
        ("/tokenize", {"messages": [], "model": "wordy"}, "messages", "cannot be empty"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "writes its own"),
        ("/detokenize", {}, "tokens", "Field required"),
        ("/detokenize", {"tokens": [258]}, "tokens", "outside this model's vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [1], "text": "x"}, "text", "is not a parameter"),
    ],
)
async def test_what_is_wrong_is_refused_in_openais_form(http: httpx.AsyncClient, path: str, body: Any, param: str, message: str) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code in (400, 404), error["type"], error["param"]) == (True, "invalid_request_error", param)
    assert message in error["message"]


async def test_the_other_body_is_the_other_dialects(http: httpx.AsyncClient) -> None:
    """Its model reads texts as a whole, and its errors have its form."""
    for body in ({"inputs": "a"}, {"inputs": "a", "prompt": "", "messages": []}, {}):
        answer = await http.post("/tokenize", json=body)
        assert set(answer.json()) == {"error", "error_type"}
