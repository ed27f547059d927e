"""No request that is accepted holds the event loop: the worst body of every route, asked of the application in this process.

What counts is the work of one callback, in readings of a JSON list: its CPU time in that of a reading just before, so the speed of the
machine and what else runs there change nothing.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import build_app
from service.http import routing
from service.settings import Settings
from tests.service.fakes import PATIENCE_S, FakeCatalog, case, client, fake_bundle

LIST = b"[" + b"1," * 200_000 + b"1]"
MOST_READINGS = 14.0  # of the list, in one callback on the loop: together 0.1 s on a core of 2026
_TRIES = 5  # a neighbour that comes to the core after the reading makes the same work take up to twice the CPU time
WORDS = "the cat of france and two rivers "


class _Catalog(FakeCatalog):
    """Encoders over fake sessions, decoders and encoder-decoders as they are."""

    def start(self) -> None:
        super(FakeCatalog, self).start()


class Watch:
    """The longest callback since `longest_s` was 0."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.what = ""


@contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    run = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> Any:
        began = time.thread_time()
        try:
            return run(handle)
        finally:
            if (took := time.thread_time() - began) > watch.longest_s:
                watch.longest_s, watch.what = took, repr(handle)

    asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
    try:
        yield watch
    finally:
        asyncio.events.Handle._run = run  # type: ignore[attr-defined]


def reading_s() -> float:
    """CPU time of this thread for one reading of the list."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        json.loads(LIST)
        took.append(time.thread_time() - began)
    return min(took)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, decoder_bundle: Path, image_bundle: Path, encoder_decoder_bundle: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("stalls")
    return [
        fake_bundle(folder / "encoder", max_tokens=512),
        fake_bundle(folder / "reranker", "reranker", max_tokens=512),
        fake_bundle(folder / "classifier", "classifier", max_tokens=512),
        fake_bundle(folder / "tagger", "token_classifier", max_tokens=512),
        decoder_bundle,
        image_bundle,
        encoder_decoder_bundle,
    ]


@asynccontextmanager
async def asked(bundles: list[Path]) -> AsyncIterator[httpx.AsyncClient]:
    catalog = _Catalog(Settings(bundles=tuple(bundles), threads=2))
    app = build_app(catalog)
    app.state.catalog = catalog
    async with client(app, timeout=PATIENCE_S) as http:
        assert catalog.failure is None, catalog.failure
        http.app_settings = lambda **changes: catalog.reconfigure(changes)  # type: ignore[attr-defined]
        yield http


IDS = list(range(11, 101)) * 45  # 4,050 tokens
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {f"field{at}": {"type": "string"} for at in range(200)}, "additionalProperties": False}
# ruff: noqa: E501
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    # text routes
    ("completions of many tokens with log-probabilities", "/v1/completions", {"prompt": "a", "max_tokens": 300, "n": 8, "logprobs": 5, "ignore_eos": True}),
    ("completions of many choices", "/v1/completions", {"prompt": "a", "max_tokens": 64, "n": 128, "logprobs": 5, "ignore_eos": True}),
    ("completions of many prompts", "/v1/completions", {"prompt": [[11] * 1000] * 128, "max_tokens": 1, "echo": True}),
    ("prompt_logprobs", "/v1/completions", {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 20}),
    ("prompt_logprobs of many choices", "/v1/completions", {"prompt": IDS[:2040], "max_tokens": 1, "n": 12, "prompt_logprobs": 20}),
    ("echo with log-probabilities", "/v1/completions", {"prompt": IDS, "max_tokens": 0, "n": 4, "echo": True, "logprobs": 5}),
    ("echo with log-probabilities, streamed", "/v1/completions", {"prompt": IDS, "max_tokens": 1, "n": 4, "echo": True, "logprobs": 5, "stream": True}),
    ("a long prompt", "/v1/completions", {"prompt": "a" * 30_000, "max_tokens": 1, "echo": True}),
    ("many allowed tokens", "/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 128, "allowed_token_ids": list(range(100)) * 650}),
    ("chat with log-probabilities", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 300, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}),
    ("chat with log-probabilities, streamed", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 300, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": True}),
    ("chat with prompt_logprobs", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 4000}], "max_tokens": 1, "prompt_logprobs": 20}),
    ("chat of many messages", "/v1/chat/completions", {"messages": MESSAGES * 4096, "max_tokens": 1}),
    ("chat of many parts", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 256}] * 4, "max_tokens": 1}),
    ("chat with a schema", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "n": 128, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    ("a response with log-probabilities", "/v1/responses", {"input": "Hi", "max_output_tokens": 600, "include": ["message.output_text.logprobs"], "top_logprobs": 20, "ignore_eos": True}),
    ("a response with log-probabilities, streamed", "/v1/responses", {"input": "Hi", "max_output_tokens": 600, "include": ["message.output_text.logprobs"], "top_logprobs": 20, "ignore_eos": True, "stream": True}),
    ("pictures", "/v1/images/generations", {"prompt": "7", "n": 10, "size": "1024x768"}),
    ("a picture, streamed", "/v1/images/generations", {"prompt": "7", "size": "1024x768", "stream": True, "partial_images": 3}),
    ("an encoder-decoder's attention", "/v1/completions", {"model": "tiny-writer", "prompt": ["abcdefgh"] * 16, "max_tokens": 64, "attention": True, "logprobs": 5}),
    ("tokens of a prompt", "/tokenize", {"prompt": "a" * 300_000, "return_token_strs": True}),
    ("text of tokens", "/detokenize", {"tokens": IDS * 10}),
    ("a chat of very many calls", "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" + "1," * 320 + "1]"}}] * 128}] * 8, "max_tokens": 1}),
    ("TGI's details", "/generate", {"inputs": "a" * 30_000, "parameters": {"max_new_tokens": 300, "details": True, "decoder_input_details": True, "top_n_tokens": 20}}),
    ("many stop tokens", "/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 128, "stop_token_ids": [20] * 128, "logit_bias": {str(at): 1 for at in range(100)}}),
    ("a regex with many states", "/v1/completions", {"prompt": "a", "max_tokens": 4, "n": 31, "guided_regex": "a{2000}"}),
    ("stop strings", "/v1/completions", {"prompt": "a", "max_tokens": 300, "n": 32, "stop": ["a" * 1024] * 4, "ignore_eos": True}),
    ("a long chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 30_000}], "max_tokens": 1}),
    ("embeddings of many ids", "/v1/embeddings", {"input": [[5] * 255] * 2048}),
    ("Jina with long texts", "/v1/rerank", {"model": "reranker", "query": WORDS, "documents": [WORDS * 100] * 500}),
    # vectors
    ("embeddings", "/v1/embeddings", {"input": [WORDS] * 2048}),
    ("embeddings of a long text", "/v1/embeddings", {"input": WORDS * 3_000}),
    ("embed", "/embed", {"inputs": [WORDS] * 2048}),
    ("embed_all", "/embed_all", {"inputs": [WORDS * 10] * 200}),
    ("similarity", "/similarity", {"inputs": {"source_sentence": WORDS, "sentences": [WORDS] * 2000}}),
    ("rerank", "/rerank", {"query": WORDS, "texts": [WORDS] * 1000, "return_text": True}),
    ("predict", "/predict", {"inputs": [[WORDS]] * 1000}),
    ("TEI's tokenize", "/tokenize", {"inputs": WORDS * 3_000, "model": "encoder"}),
    ("decode", "/decode", {"ids": [[5] * 1000] * 200}),
    ("Cohere's embed", "/v2/embed", {"model": "encoder", "texts": [WORDS] * 96, "input_type": "search_document", "embedding_types": ["float", "int8", "uint8", "binary", "ubinary"]}),
    ("Cohere's rerank", "/v2/rerank", {"model": "reranker", "query": WORDS, "documents": [WORDS] * 1000}),
    ("Jina's rerank", "/v1/rerank", {"model": "reranker", "query": WORDS, "documents": [WORDS] * 1000}),
    ("infer", "/v2/models/encoder/infer", {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2048], "data": [WORDS] * 2048}]}),
]  # fmt: skip


@pytest.mark.exhaustive
async def test_no_accepted_request_holds_the_event_loop(bundles: list[Path]) -> None:
    slow = []
    with watched() as watch:
        async with asked(bundles) as http:
            assert (await http.get("/v1/models/encoder")).status_code == 200  # FastAPI draws up its routes with the first one
            for name, path, body in BODIES:
                content = json.dumps(body).encode()
                await asyncio.sleep(0)
                for _ in range(_TRIES):
                    one_s = reading_s()
                    watch.longest_s = 0.0
                    await asyncio.sleep(0)
                    async with http.stream("POST", path, content=content) as answer:  # whole by now; reading would join it on this loop
                        assert answer.status_code == 200, f"{name}: {(await answer.aread())[:400]!r}"
                    await asyncio.sleep(0)
                    if (readings := watch.longest_s / one_s) <= MOST_READINGS:
                        break
                else:
                    slow.append(f"{name}: {readings:.1f} readings in {watch.what[:200]}")
    assert not slow


async def test_many_large_bodies_are_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each iteration of the event loop, so that what waits for the loop waits for one body at most."""
    body = b'{"model": "none", "input": [%b[1]]}' % (b"[]," * 16_000)
    iteration, read = 0, list[int]()

    async def counting() -> None:
        nonlocal iteration
        while True:
            await asyncio.sleep(0)
            iteration += 1

    def noted(*arguments: Any) -> Any:
        read.append(iteration)
        return parsed(*arguments)

    parsed = routing.read
    monkeypatch.setattr(routing, "read", noted)
    async with asked([fake_bundle(tmp_path / "encoder")]) as http:
        counter = asyncio.create_task(counting())
        answers = await asyncio.gather(*(http.post("/v1/embeddings", content=body) for _ in range(20)))
        counter.cancel()
    assert {answer.status_code for answer in answers} == {404}
    assert len(read) == 20
    assert len(set(read)) == 20, "two were read in one iteration"


async def test_an_answer_that_could_be_too_large_is_refused_before_anything_is_computed(decoder_bundle: Path) -> None:
    cases: list[Any] = [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "n": 32, "max_tokens": 22_000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20},
            "n",
            "32 choices",
        ),
        ("/v1/completions", {"prompt": [[11] * 2040], "n": 128, "prompt_logprobs": 20}, "n", "128 choices"),
        (
            "/v1/completions",
            {"prompt": "a" * 100_000, "max_tokens": 0, "n": 32, "echo": True, "logprobs": 5, "stream": True},
            "n",
            "32 choices",
        ),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1_000_000, "n": 64}, "n", "stream=true"),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 1_000_000, "include": ["message.output_text.logprobs"], "stream": True},
            "max_output_tokens",
            "1 choices",
        ),
    ]
    async with asked([decoder_bundle]) as http:
        for path, body, param, numbers in cases:
            with case(path, param, numbers):
                answer = await http.post(path, json=body)
                assert answer.status_code == 413, answer.text
                error = answer.json()["error"]
                assert error["param"] == param
                assert numbers in error["message"]
                assert "and the most is 67108864: lower " in error["message"]
        assert 'vllm:prompt_tokens_total{model_name="tiny-decoder"} 0.0' in (await http.get("/metrics")).text


@pytest.mark.parametrize(("route", "stream"), [("completions", False), ("completions", True), ("chat", False)])
async def test_a_bound_on_an_answer_is_one(decoder_bundle: Path, route: str, stream: bool) -> None:
    """What was said to be possible is not surpassed by what comes."""
    body: dict[str, Any] = {"n": 3, "max_tokens": 50, "ignore_eos": True, "logit_bias": {"5": 100}, "temperature": 1.0}
    if route == "chat":
        path, body = "/v1/chat/completions", {**body, "messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    else:
        path, body = "/v1/completions", {**body, "prompt": "a" * 80, "logprobs": 5, "echo": True}
    async with asked([decoder_bundle]) as http:
        http_settings = http.app_settings  # type: ignore[attr-defined]
        whole = await http.post(path, json=body)
        assert whole.status_code == 200
        http_settings(max_answer_bytes=1024)
        refused = await http.post(path, json={**body, "stream": stream})
    said = refused.json()["error"]["message"]
    could = int(said.split(" bytes")[0].rsplit(" ", 1)[1])
    assert refused.status_code == 413
    if not stream:
        assert len(whole.content) <= could < 8 * len(whole.content)
