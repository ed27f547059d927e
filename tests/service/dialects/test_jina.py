"""Jina's `/v1/rerank`."""

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from export import contract
from service.dialects.jina import JinaRerankResponse
from tests.service.fakes import FakeSession, client, fake_app, fake_bundle, fake_ids

QUERY = "where is the cat"
DOCUMENTS = ["a dog", "the cat", "red fish", "green bird"]
LOGITS = [float(FakeSession().row(contract.LOGITS, fake_ids(QUERY, document))[0]) for document in DOCUMENTS]
ORDER = sorted(range(4), key=lambda index: -LOGITS[index])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, where: str) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("jina")
    bundles = fake_bundle(folder / "enc"), fake_bundle(folder / "ranker", "reranker"), fake_bundle(folder / "labels", "classifier")
    async with client(fake_app(*bundles, max_client_batch=25, cache_bytes=0)) as running:
        yield running


def rerank(*documents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "ranker", "query": QUERY, "documents": documents, **fields}


async def test_rerank_answers_in_jinas_form(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/rerank", json=rerank(*DOCUMENTS))
    assert response.status_code == 200
    JinaRerankResponse.model_validate(response.json())
    tokens = sum(len(fake_ids(QUERY, document)) for document in DOCUMENTS)
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


async def test_equal_documents_keep_their_order(http: httpx.AsyncClient) -> None:
    for model in ("ranker", "enc"):
        results = (await http.post("/v1/rerank", json=rerank(*["a dog"] * 20, model=model))).json()["results"]
        assert [result["index"] for result in results] == list(range(20))


async def test_rerank_refuses(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], int, str]] = [
        ({"documents": []}, 400, "documents"),
        ({"documents": "a dog"}, 422, "documents"),
        ({"documents": [{"image": "x"}]}, 422, "documents.0"),
        ({"query": ""}, 400, "query"),
        ({"top_n": -1}, 422, "top_n"),
        ({"documents": ["a"] * 26}, 422, "batch size 26"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "labels"}, 422, "labels"),
    ]
    for change, status, said in rows:
        response = await http.post("/v1/rerank", json=rerank("a", **change))
        assert (response.status_code, list(response.json())) == (status, ["detail", "message"]), change
        assert said in response.json()["detail"], change
