"""Jina's `/v1/rerank`."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from export import contract
from service.dialects.jina import JinaRerankResponse
from tests.service.fakes import FakeSession, client, fake_app, fake_bundle, fake_tokenizer

TOKENIZER = fake_tokenizer()
QUERY = "where is the cat"
DOCUMENTS = ["a dog", "the cat", "red fish", "green bird"]
LOGITS = [float(FakeSession().row(contract.LOGITS, TOKENIZER.encode(QUERY, document).ids)[0]) for document in DOCUMENTS]
ORDER = sorted(range(4), key=lambda index: -LOGITS[index])


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fake_app(fake_bundle(tmp_path / "enc"), fake_bundle(tmp_path / "ranker", "reranker"))) as running:
        yield running


def rerank(*documents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "ranker", "query": QUERY, "documents": documents, **fields}


async def test_rerank_answers_in_jinas_form(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/rerank", json=rerank(*DOCUMENTS))
    assert response.status_code == 200
    JinaRerankResponse.model_validate(response.json())
    tokens = sum(len(TOKENIZER.encode(QUERY, document).ids) for document in DOCUMENTS)
    assert response.json() == {
        "model": "ranker",
        "object": "list",
        "usage": {"total_tokens": tokens, "prompt_tokens": tokens},
        "results": [
            {
                "index": index,
                "relevance_score": pytest.approx(1 / (1 + math.exp(-LOGITS[index])), abs=1e-15),
                "document": {"text": DOCUMENTS[index]},
            }
            for index in ORDER
        ],
        "truncated": [],
        "warnings": [],
        "id": response.headers["x-request-id"],
        "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
    }


async def test_documents_come_back_unless_they_are_not_wanted(http: httpx.AsyncClient) -> None:
    results = (await http.post("/v1/rerank", json=rerank(*DOCUMENTS, return_documents=False))).json()["results"]
    assert [set(result) for result in results] == [{"index", "relevance_score"}] * 4


@pytest.mark.parametrize(("top_n", "count"), [(None, 4), (0, 4), (1, 1), (3, 3), (9, 4)])
async def test_top_n_keeps_the_best(http: httpx.AsyncClient, top_n: int | None, count: int) -> None:
    results = (await http.post("/v1/rerank", json=rerank(*DOCUMENTS, top_n=top_n))).json()["results"]
    assert [result["index"] for result in results] == ORDER[:count]


async def test_documents_may_be_objects(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/rerank", json=rerank("a dog", {"text": "the cat"}))).json()
    assert {result["index"]: result["document"]["text"] for result in body["results"]} == {0: "a dog", 1: "the cat"}


async def test_raw_scores_are_logits(http: httpx.AsyncClient) -> None:
    results = (await http.post("/v1/rerank", json=rerank(*DOCUMENTS, raw_scores=True))).json()["results"]
    assert [result["relevance_score"] for result in results] == [LOGITS[index] for index in ORDER]


async def test_equal_documents_keep_their_order(http: httpx.AsyncClient) -> None:
    for model in ("ranker", "enc"):
        results = (await http.post("/v1/rerank", json=rerank(*["a dog"] * 20, model=model))).json()["results"]
        assert [result["index"] for result in results] == list(range(20))


async def test_a_document_that_was_cut_is_reported(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/rerank", json=rerank("one", "dog " * 100))
    assert response.json()["truncated"] == [{"index": 1, "tokens": len(TOKENIZER.encode(QUERY, "dog " * 100)), "kept": 64}]
    assert response.headers["x-truncated-inputs"].startswith("1; 1:")


async def test_an_encoder_stands_in_and_says_so(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "enc"))) as http:
        body = (await http.post("/v1/rerank", json=rerank(*DOCUMENTS, model=None))).json()
    assert body["model"] == "enc"
    assert "encoder, not a reranker" in body["warnings"][0]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": "a dog"}, 422, "documents"),
        ({"documents": [{"image": "x"}]}, 422, "documents.0"),
        ({"query": ""}, 400, "query"),
        ({"query": None}, 422, "query"),
        ({"top_n": -1}, 422, "top_n"),
        ({"top_n": "1"}, 422, "top_n"),
        ({"top_n": True}, 422, "top_n"),
        ({"top_n": 10**40}, 422, "top_n"),
        ({"return_documents": "perhaps"}, 422, "return_documents"),
        ({"documents": ["a"] * 6}, 422, "batch size 6"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "labels"}, 422, "labels"),
    ],
)
async def test_rerank_refuses(tmp_path: Path, change: dict[str, Any], status: int, said: str) -> None:
    app = fake_app(fake_bundle(tmp_path / "ranker", "reranker"), fake_bundle(tmp_path / "labels", "classifier"), max_client_batch=5)
    async with client(app) as http:
        response = await http.post("/v1/rerank", json=rerank("a", **change))
    assert response.status_code == status
    assert list(response.json()) == ["detail", "message"]
    assert said in response.json()["detail"]


async def test_errors_of_the_framework_speak_jina_too(tmp_path: Path) -> None:
    app = fake_app(fake_bundle(tmp_path / "enc"), api_keys=("secret-key",), max_body_bytes=1024)
    key = {"authorization": "Bearer secret-key"}
    async with client(app) as http:
        answers = [
            (401, await http.post("/v1/rerank", json={})),
            (400, await http.post("/v1/rerank", content=b"{", headers=key)),
            (400, await http.post("/v1/rerank", content=b'{"query": "\\ud800"}', headers=key)),
            (413, await http.post("/v1/rerank", content=b" " * 1025, headers=key)),
            (405, await http.get("/v1/rerank", headers=key)),
        ]
    for status, response in answers:
        assert response.status_code == status
        assert list(response.json()) == ["detail", "message"]


async def test_what_never_fits_is_a_413_and_a_failed_run_a_500(tmp_path: Path) -> None:
    app = fake_app(fake_bundle(tmp_path / "ranker", "reranker"), max_queue_tokens=64)
    async with client(app) as http:
        never = await http.post("/v1/rerank", json=rerank(*["a dog and a cat " * 3 + str(n) for n in range(9)]))
        app.state.catalog.session("ranker").broken = True
        failed = await http.post("/v1/rerank", json=rerank("a dog"))
    assert (never.status_code, failed.status_code) == (413, 500)
    assert list(never.json()) == list(failed.json()) == ["detail", "message"]


async def test_the_document_names_every_status(http: httpx.AsyncClient) -> None:
    responses = (await http.get("/openapi.json")).json()["paths"]["/v1/rerank"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "408", "413", "415", "422", "429", "500", "503", "504"}
    assert "HTTPValidationError" not in str(responses)
