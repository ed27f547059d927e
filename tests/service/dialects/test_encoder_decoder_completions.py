"""`/v1/completions` of an encoder-decoder, over its real bundle: greedy, beams, streams, attention, and what is refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from models.encoder_decoder.search import attended, beam
from models.folders.byte_tokenizer import byte_tokenizer
from service.app import build_app
from service.catalog import Catalog
from service.settings import Settings
from tests.encoder_decoders import END, random_encoder_decoder
from tests.service.fakes import client
from tests.service.generation_fakes import events
from tests.service.pool_fakes import LoopbackGateway

PROMPT = "forty-two"
TOKENIZER = byte_tokenizer()
TOLERANCE = 1e-3  # what is sent has four digits


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(encoder_decoder_bundle: Path, where: str) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(bundles=(encoder_decoder_bundle,), threads=1, stream_interval_s=0, aliases={"words": "tiny-writer"})
    catalog = Catalog(settings) if where == "here" else LoopbackGateway(Catalog(settings), "generators")
    app: Any = build_app(catalog)
    app.state.catalog = catalog
    async with client(app) as made:
        assert catalog.failure is None, catalog.failure
        yield made


@pytest.fixture
def http(shared: httpx.AsyncClient) -> httpx.AsyncClient:
    return shared


def source(text: str = PROMPT) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([TOKENIZER.encode(text).ids])
    return ids, torch.ones_like(ids, dtype=torch.bool)


def text_of(tokens: list[int]) -> str:
    """As the service writes it. The end is a byte like any other in this vocabulary."""
    return str(TOKENIZER.decode(tokens[: tokens.index(END) + 1] if END in tokens else tokens))


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json={"model": "tiny-writer", "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


@pytest.mark.pool
async def test_the_likeliest_output_in_openais_form(http: httpx.AsyncClient) -> None:
    content = await whole(http)
    tokens, _ = attended(random_encoder_decoder(), *source())
    (choice,) = content["choices"]
    assert choice == {
        "index": 0,
        "text": text_of(tokens[0].tolist()),
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
        "stop_reason": None,
    }
    assert content["usage"]["prompt_tokens"] == len(PROMPT)
    assert content["usage"]["completion_tokens"] == tokens.shape[1]
    assert content["model"] == "tiny-writer"


async def test_model_and_alias_and_prompts_of_all_forms(http: httpx.AsyncClient) -> None:
    one = (await whole(http))["choices"][0]["text"]
    for fields in (
        {"model": "words"},
        {"model": None},
        {"prompt": TOKENIZER.encode(PROMPT).ids},
        {"temperature": 0, "seed": 3, "user": "me"},
        {"temperature": 1, "top_p": 1},  # the API's defaults
    ):
        assert (await whole(http, **fields))["choices"][0]["text"] == one
    two = await whole(http, prompt=["seven", PROMPT])
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][1]["text"] == one


async def test_a_beam_gives_its_best_and_n_of_them(http: httpx.AsyncClient) -> None:
    best = text_of(beam(random_encoder_decoder(), *source(), width=4).tokens[0].tolist())
    assert (await whole(http, num_beams=4))["choices"][0]["text"] == best
    several = await whole(http, num_beams=4, n=3)
    assert several["choices"][0]["text"] == best
    assert len({choice["text"] for choice in several["choices"]}) == 3
    assert several["usage"]["prompt_tokens"] == len(PROMPT)
    assert len((await whole(http, n=2))["choices"]) == 2


async def test_attention_has_a_row_for_each_token_written(http: httpx.AsyncClient) -> None:
    tokens, weights = attended(random_encoder_decoder(), *source())
    content = await whole(http, attention=True)
    matrix = content["choices"][0]["attention"]
    assert matrix["source"] == list(PROMPT)
    assert len(matrix["tokens"]) == tokens.shape[1]
    torch.testing.assert_close(torch.tensor(matrix["weights"]), weights[0], atol=TOLERANCE, rtol=0)
    assert "attention" not in (await whole(http))["choices"][0]


def scores(tokens: list[int]) -> torch.Tensor:
    """Of each of these tokens, written in this order, log p of all that could stand in its place: (T, V)."""
    model, (ids, mask) = random_encoder_decoder(), source()
    with torch.inference_mode():
        memory, state = model.read(ids, mask)
        rows = []
        for previous in [model.config.begin_token_id, *tokens[:-1]]:
            logits, state, _ = model.step(torch.tensor([previous]), state, memory, mask)
            rows.append(logits[0].log_softmax(0))
    return torch.stack(rows)


@pytest.mark.parametrize("fields", [{}, {"num_beams": 4}])
async def test_log_probabilities_are_the_models_own_of_the_tokens_that_it_wrote(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    found = beam(random_encoder_decoder(), *source(), width=fields.get("num_beams", 1)).tokens[0].tolist()
    tokens = found[: found.index(END) + 1] if END in found else found
    expected = scores(tokens)
    (choice,) = (await whole(http, logprobs=2, **fields))["choices"]
    logprobs = choice["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), len(tokens)
    )
    torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"]), expected[range(len(tokens)), tokens], atol=TOLERANCE, rtol=0)
    for top, row, token in zip(logprobs["top_logprobs"], expected, tokens, strict=True):
        wanted = sorted({*row.topk(2).values.tolist(), float(row[token])})
        assert sorted(top.values()) == pytest.approx(wanted, abs=TOLERANCE)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert (await whole(http, **fields))["choices"][0]["logprobs"] is None


@pytest.mark.pool
@pytest.mark.parametrize("fields", [{}, {"num_beams": 3, "n": 2}])
async def test_a_stream_is_the_answer_in_pieces_with_its_attention_at_the_end(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    fields = {**fields, "attention": True, "logprobs": 1}
    want = await whole(http, **fields)
    body = {"model": "tiny-writer", "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **fields}
    *pieces, usage, done = events((await http.post("/v1/completions", json=body)).text)
    assert done == "[DONE]"
    assert usage["usage"] == want["usage"]
    for choice in want["choices"]:
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["attention"] == choice["attention"]
        for name, values in choice["logprobs"].items():
            assert [value for piece in own for value in piece["logprobs"][name]] == values
        assert not any("attention" in piece for piece in own[:-1])


async def test_what_is_refused_names_the_field(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": 0.7}, "temperature", "writes the likeliest text"),
        ({"top_p": 0.5}, "top_p", "writes the likeliest text"),
        ({"prompt_logprobs": 2}, "prompt_logprobs", "leave it out"),
        ({"echo": True}, "echo", "leave it out"),
        ({"stop": ["a"]}, "stop", "leave it out"),
        ({"num_beams": 9}, "num_beams", "less than or equal to 8"),
        ({"num_beams": 2, "n": 3}, "n", "n=3 is more than num_beams=2"),
        ({"n": 9}, "n", "the most is 8"),
        ({"max_tokens": 0}, "max_tokens", "nothing to answer"),
        ({"beam": 3}, "beam", "not a parameter"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [300]}, "prompt", "token id 300"),
        ({"prompt": "x" * 41}, "prompt", "41 tokens and the maximum context length is 40 tokens"),
    ]
    for fields, param, words in rows:
        answer = await http.post("/v1/completions", json={"model": "tiny-writer", "prompt": PROMPT, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (fields, error)
        assert words in error["message"], fields


async def test_other_routes_say_of_which_kind_it_is(http: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        answer = await http.post(path, json={"model": "tiny-writer", **body})
        assert answer.status_code == 400
        assert "kind encoder_decoder" in answer.json()["error"]["message"]
    listed = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["tiny-writer", "words"]
    assert (await http.get("/health/ready")).status_code == 200
    assert 'model_name="tiny-writer"' in (await http.get("/metrics")).text
