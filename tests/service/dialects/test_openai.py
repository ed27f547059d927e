"""OpenAI's API: by hand, and by its own client."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from service.dialects.openai.embeddings import EmbeddingRequest
from service.runtime.onnx import Array
from tests.service.fakes import FakeCatalog, case, client, fake_app, fake_bundle, until
from tests.service.http.test_edge import Caller


class Service:
    """An application under test: its client, its catalog, and what the model would say of a text."""

    def __init__(self, http: httpx.AsyncClient, catalog: FakeCatalog, app: Any) -> None:
        self.http, self.catalog, self.app = http, catalog, app
        self.session = catalog.session("mini")

    async def embed(self, input: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/embeddings", json={"input": input, "model": "mini", **fields}, headers=headers or {})

    async def vectors(self, input: Any, **fields: Any) -> list[Any]:
        answer = await self.embed(input, **fields)
        assert answer.status_code == 200, answer.text
        data = answer.json()["data"]
        assert [entry["index"] for entry in data] == list(range(len(data)))
        return [entry["embedding"] for entry in data]

    def ids(self, text: str) -> list[int]:
        return list(self.catalog.get("mini").texts.tokenizer.encode(text).ids)

    def row(self, text: str, output: str = "sentence_embedding") -> Array:
        return self.session.row(output, self.ids(text))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    bundles = fake_bundle(tmp_path / "mini"), fake_bundle(tmp_path / "rank", "reranker")
    app = fake_app(*bundles, aliases={"text-embedding-3-small": "mini"})
    async with client(app) as http:
        yield Service(http, app.state.catalog, app)


def error(answer: httpx.Response) -> dict[str, Any]:
    content: dict[str, Any] = answer.json()["error"]
    return {"status": answer.status_code, **content}


# Answers ---------------------------------------------------------------------------------------------------------------------------------


async def test_the_answer_has_openais_form(service: Service) -> None:
    content = (await service.embed("the cat")).json()
    assert list(content) == ["object", "data", "model", "system_fingerprint", "usage", "truncated"]
    assert (content["object"], content["model"], content["truncated"]) == ("list", "mini", [])
    assert content["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert content["data"][0]["object"] == "embedding"
    assert content["data"][0]["embedding"] == pytest.approx(service.row("the cat").tolist(), abs=1e-7)


async def test_a_base_url_without_v1_does_too(service: Service) -> None:
    with_v1 = await service.embed("cat")
    without = await service.http.post("/embeddings", json={"input": "cat", "model": "mini"})
    assert without.json() == with_v1.json()
    assert error(await service.http.post("/embeddings", json={"input": ""}))["code"] == "empty_input"


async def test_texts_ids_and_a_mixture_of_both_are_inputs(service: Service) -> None:
    cat, dog = service.row("cat"), service.row("dog")
    ids = service.ids("cat")
    for given, wanted in (
        ("cat", [cat]),
        (["cat", "dog"], [cat, dog]),
        (ids, [cat]),
        ([ids, service.ids("dog")], [cat, dog]),
        (["dog", ids], [dog, cat]),
    ):
        got = await service.vectors(given)
        assert np.allclose(got, wanted, atol=1e-7)


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_fewer_dimensions_have_length_1_again(service: Service, form: str) -> None:
    (got,) = await service.vectors("cat", encoding_format=form, dimensions=8)
    row = np.frombuffer(base64.b64decode(got), "<f4") if form == "base64" else np.array(got)
    wanted = service.row("cat")[:8]
    assert np.allclose(row, wanted / np.linalg.norm(wanted), atol=1e-6)


async def test_unnormalised_vectors_are_the_pooled_ones(service: Service) -> None:
    assert np.allclose(await service.vectors("cat", normalize=False), service.row("cat", "pooled"), atol=1e-6)


async def test_prompts_go_by_name_or_in_full(service: Service) -> None:
    wanted = [service.row("query: cat")]
    assert np.allclose(await service.vectors("cat", prompt_name="query"), wanted, atol=1e-7)
    assert np.allclose(await service.vectors("cat", prompt="query: "), wanted, atol=1e-7)


async def test_cut_inputs_are_named_in_a_field_and_a_header(service: Service) -> None:
    answer = await service.embed(["cat", "dog " * 100])
    assert answer.json()["truncated"] == [{"index": 1, "tokens": 102, "kept": 64}]
    assert answer.headers["x-truncated-inputs"] == "1; 1:102>64"
    assert answer.json()["usage"]["total_tokens"] == 3 + 64
    assert (await service.embed("cat")).headers["x-truncated-inputs"] == "0"


async def test_the_side_of_a_cut_can_be_chosen(service: Service) -> None:
    cases: list[Any] = [(True, "dog"), ("right", "dog"), ("left", "cat"), (None, "dog")]
    for truncate, kept in cases:
        with case(truncate, kept):
            text = "dog " * 62 + "cat " * 62
            assert np.allclose(await service.vectors(text, truncate=truncate), service.row(f"{kept} " * 62), atol=1e-7)


async def test_models_are_listed_with_their_aliases(service: Service) -> None:
    content = (await service.http.get("/v1/models")).json()
    assert [entry["id"] for entry in content["data"]] == ["mini", "rank", "text-embedding-3-small"]
    first = content["data"][0]
    assert first.items() >= {"id": "mini", "object": "model", "created": 1767323045, "owned_by": "attnserve", "kind": "encoder"}.items()
    assert (first["state"], first["pictures"], first["maps"], first["chat_template"]) == (None, None, None, False)
    assert (await service.http.get("/v1/models/text-embedding-3-small")).json()["id"] == "text-embedding-3-small"
    assert error(await service.http.get("/v1/models/huge"))["code"] == "model_not_found"


async def test_a_model_with_a_slash_in_its_name_can_be_asked_for(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "m", name="org/mini"))) as http:
        assert (await http.get("/v1/models/org/mini")).json()["id"] == "org/mini"


# Refusals --------------------------------------------------------------------------------------------------------------------------------


async def test_what_is_wrong_with_a_request_is_400_in_one_sentence(service: Service) -> None:
    cases: list[Any] = [
        ({"input": ""}, "empty_input", "cannot be empty"),
        ({"input": [[]]}, "empty_input", "cannot be empty"),
        ({"input": ["cat", ""]}, "empty_input", "cannot be empty"),
        ({"input": [5, 100_000]}, "tokenizer", "token id 100000 of input 0 is outside this model's vocabulary"),
        ({"input": ["cat", [5, 100_000]]}, "tokenizer", "token id 100000 of input 1"),
        ({"input": "cat " * 100, "truncate": False}, "context_length_exceeded", "must have less than 65 tokens. Given: 102"),
        ({"input": "cat", "dimensions": 17}, "invalid_request", "between 1 and 16, the width of this model. Given: 17"),
        ({"input": "cat", "dimensions": 0}, "invalid_request", "dimensions"),
        ({"input": "cat", "dimensions": 9, "encoding_format": "binary"}, "invalid_request", "not a multiple of 8"),
        ({"input": "cat", "encoding_format": "hex"}, "invalid_request", "encoding_format"),
        ({"input": "cat", "prompt_name": "title"}, "invalid_request", "'title' is not known to this model; it has: document, query"),
        ({"input": [5, 6], "prompt_name": "query"}, "invalid_request", "before token ids"),
        ({"input": [True]}, "invalid_request", "input"),
        ({"input": {"text": "cat"}}, "invalid_request", "input"),
        ({}, "invalid_request", "input"),
        ({"input": ["a"] * 2049}, "batch_too_large", "batch size 2049 > maximum allowed batch size 2048"),
        ({"input": "cat", "model": "rank"}, "wrong_model_kind", "is of kind reranker"),
    ]
    for fields, code, words in cases:
        with case(fields, code, words):
            answer = await service.http.post("/v1/embeddings", json=fields)
            refused = error(answer)
            assert (refused["status"], refused["type"], refused["code"]) == (400, "invalid_request_error", code)
            assert words in refused["message"]
            assert service.session.batches == []


@pytest.mark.pool
async def test_errors_by_item_leave_the_other_vectors_alone(service: Service) -> None:
    answer = await service.embed(["cat", "", "dog", [10_000]], headers={"x-item-errors": "1"})
    assert answer.status_code == 200
    data = answer.json()["data"]
    assert [entry["embedding"] is None for entry in data] == [False, True, False, True]
    assert [entry.get("error", {}).get("code") for entry in data] == [None, "empty_input", None, "tokenizer"]
    assert answer.json()["usage"]["total_tokens"] == 6


async def test_a_vector_that_must_not_leave_is_500_or_one_items_error(service: Service) -> None:
    service.session.bad_rows[tuple(service.ids("cat"))] = float("nan")
    refused = error(await service.embed(["dog", "cat"]))
    assert (refused["status"], refused["type"], refused["code"]) == (500, "server_error", "backend_failure")
    by_item = (await service.embed(["dog", "cat"], headers={"x-item-errors": "1"})).json()["data"]
    assert by_item[0]["embedding"]
    assert by_item[1]["error"]["code"] == "backend_failure"


def test_the_first_bad_element_of_a_list_ends_its_check() -> None:
    """A complaint about each of 100,000 nulls took 3 s and half a gigabyte."""
    cases: list[Any] = ["null", '"a",null', "1,null", "[1],[null]", "[null]", "[1,null]"]
    for element in cases:
        with case(element):
            with pytest.raises(ValidationError) as refused:
                EmbeddingRequest.model_validate_json(b'{"input":[' + f"{element},".encode() * 100 + b"null]}")
            assert refused.value.error_count() < 10


# NDJSON ----------------------------------------------------------------------------------------------------------------------------------

NDJSON = {"accept": "application/x-ndjson"}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_each_input_is_a_line_and_the_totals_are_the_last(service: Service) -> None:
    texts = [f"{number} " * (number % 9 + 1) for number in range(100)] + ["dog " * 100]
    *rows, totals = lines(await service.embed(texts, headers=NDJSON))
    assert sorted(row["index"] for row in rows) == list(range(101))
    for row in rows:
        text = texts[row["index"]] if row["index"] < 100 else "dog " * 62
        assert row["embedding"] == pytest.approx(service.row(text).tolist(), abs=1e-7)
    assert totals["truncated"] == [{"index": 100, "tokens": 102, "kept": 64}]
    assert totals["usage"]["total_tokens"] == sum(min(len(service.ids(text)), 64) for text in texts)


@pytest.mark.pool
async def test_lines_leave_as_their_runs_end(service: Service) -> None:
    """The first batch's lines are there while the second is still being computed."""
    service.session.hold()
    caller = Caller(service.app, headers=NDJSON)
    caller.body(json.dumps({"input": ["cat", "dog " * 60, "fish " * 60]}).encode())
    await service.session.entered(2)
    service.session.release(1)
    await until(lambda: len(caller.sent) >= 2)
    assert service.session.active
    service.session.open()
    await until(lambda: caller.sent[-1].get("more_body") is False)
    caller.hang_up()
    await caller.done()
    content = b"".join(message.get("body", b"") for message in caller.sent)
    assert len(content.splitlines()) == 4


async def test_an_error_of_one_input_is_its_line(service: Service) -> None:
    *rows, totals = lines(await service.embed(["cat", "", [10_000]], headers=NDJSON))
    by_index = {row["index"]: row for row in rows}
    assert by_index[0]["embedding"]
    assert [by_index[index]["error"]["code"] for index in (1, 2)] == ["empty_input", "tokenizer"]
    assert totals["usage"]["total_tokens"] == 3


async def test_what_is_refused_before_the_first_line_keeps_its_status(service: Service) -> None:
    assert error(await service.embed([], headers=NDJSON))["status"] == 400
    assert error(await service.embed(["a"] * 2049, headers=NDJSON))["code"] == "batch_too_large"
    service.session.hold()
    late = await service.embed(["", "cat"], headers={**NDJSON, "x-request-timeout-ms": "30"})
    assert error(late)["status"] == 504
    service.session.open()


@pytest.mark.pool
async def test_what_fails_after_the_first_line_is_the_last_one_and_there_are_no_totals(service: Service) -> None:
    service.session.failures[0] = RuntimeError("no memory")
    rows = lines(await service.embed(["cat"], headers=NDJSON))
    assert rows[0]["error"]["code"] == "backend_failure"
    await service.vectors("cat")  # in the cache from here on: its line leaves at once
    service.session.hold()
    *rows, last = lines(await service.embed(["cat", "dog"], headers={**NDJSON, "x-request-timeout-ms": "1500"}))
    assert [row["index"] for row in rows] == [0]
    assert "usage" not in last
    assert last["error"]["type"] == "timeout_error"
    service.session.open()
