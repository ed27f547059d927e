"""Queries and documents: how their texts are written, in every dialect's own words."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from export import contract
from service.encoding.sparse import QueryTable
from tests.service.fakes import HIDDEN, SPARSE_WIDTH, VOCABULARY, case, client, fake_app, fake_bundle, fake_ids

Q, D, FILL = VOCABULARY.index("q"), VOCABULARY.index("d"), VOCABULARY.index("x")
ROLES = {
    "query": contract.Role.model_validate(
        {"prompt": "query", "marker_id": Q, "max_tokens": 8, "expansion": {"token_id": FILL, "tokens": 8, "attended": False}}
    ),
    "document": contract.Role.model_validate({"prompt": "document", "marker_id": D}),
}
COLBERT: dict[str, Any] = {"roles": ROLES, "multivector": contract.MultiVector(width=HIDDEN, skipped_ids=(fake_ids(".")[1],))}
TABLE = {"sparse": contract.Sparse.model_validate({"size": SPARSE_WIDTH, "query_table": "idf.bin"})}


def marked(text: str, marker: int) -> list[int]:
    first, *others = fake_ids(text)
    return [first, marker, *others]


QUERY = [*marked("query: cat", Q), FILL, FILL]
DOCUMENT = marked("passage: cat", D)
PLAIN = marked("cat", D)  # a text without a role is a document without a prompt


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = fake_app(
        fake_bundle(tmp_path / "colbert", **COLBERT),
        fake_bundle(tmp_path / "table", prompts={}, **TABLE),
        fake_bundle(tmp_path / "plain", prompts={}),
        cache_bytes=0,
    )
    async with client(app) as made:
        made.catalog = app.state.catalog  # type: ignore[attr-defined]
        yield made


async def sent(http: Any, path: str, **body: Any) -> list[list[int]]:
    """Return the token ids that the model gets for a request."""
    session = http.catalog.session(body.setdefault("model", "colbert"))
    session.forget()
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [row for batch in session.batches for row in batch]


@pytest.mark.pool
async def test_a_query_has_prompt_marker_and_filling_to_which_no_token_attends(http: Any) -> None:
    """Prompt and marker stand as in sentence-transformers 6.0.1: [CLS] [Q] search_query: .."""
    assert fake_ids("query: cat") == [fake_ids("cat")[0], *fake_ids("query :")[1:-1], *fake_ids("cat")[1:]]
    body = {"model": "colbert", "input": "cat", "outputs": ["multivector"], "input_type": "query"}
    item = (await http.post("/v1/embeddings", json=body)).json()["data"][0]
    session = http.catalog.session("colbert")
    assert session.batches == [[QUERY]]
    assert session.unattended == [[2]]
    assert item["multivector"]["shape"] == [8, HIDDEN], "the filling is compared too"
    assert await sent(http, "/v1/embeddings", input=["the cat and the dog in paris"], input_type="query") == [
        [*marked("query: the cat and", Q)]
    ], "cut to the longest query, with marker and special tokens"
    assert await sent(http, "/v1/embeddings", input=QUERY) == [QUERY], "token ids are used as they are"
    assert http.catalog.session("colbert").unattended == [[0]], "and are not the same input as the query"


async def test_every_dialect_names_queries_and_documents_in_its_own_words(http: Any) -> None:
    cohere = {"texts": ["cat"]}
    for path, body, wanted in (
        ("/v1/embeddings", {"input": "cat", "input_type": "query"}, QUERY),
        ("/v1/embeddings", {"input": "cat", "input_type": "passage"}, DOCUMENT),
        ("/v1/embeddings", {"input": "cat", "task": "retrieval.query"}, QUERY),
        ("/v1/embeddings", {"input": "cat", "task": "retrieval.passage"}, DOCUMENT),
        ("/v1/embeddings", {"input": "cat", "prompt_name": "query"}, QUERY),
        ("/v1/embeddings", {"input": "cat", "input_type": "document", "prompt": ""}, PLAIN),
        ("/v1/embeddings", {"input": "cat", "input_type": "clustering"}, PLAIN),
        ("/v2/embed", {**cohere, "input_type": "search_query"}, QUERY),
        ("/v2/embed", {**cohere, "input_type": "search_document"}, DOCUMENT),
        ("/v1/embed", cohere, PLAIN),
        ("/embed", {"inputs": "cat", "prompt_name": "query"}, QUERY),
        ("/embed_all", {"inputs": "cat", "prompt_name": "document"}, DOCUMENT),
        ("/embed", {"inputs": "cat"}, PLAIN),
    ):
        with case(path, body):
            assert await sent(http, path, **body) == [wanted]
    ranked = await sent(http, "/v1/rerank", query="cat", documents=["dog"])
    assert sorted(ranked) == sorted([QUERY, marked("passage: dog", D)])


async def test_a_request_without_a_role_is_warned_if_the_model_has_roles_or_prompts(http: Any) -> None:
    for path, body, warned in (
        ("/v1/embeddings", {"model": "colbert", "input": "cat"}, True),
        ("/embed", {"model": "colbert", "inputs": "cat"}, True),
        ("/v1/embeddings", {"model": "colbert", "input": "cat", "input_type": "document"}, False),
        ("/v1/embeddings", {"model": "plain", "input": "cat"}, False),
    ):
        with case(path, body):
            headers = (await http.post(path, json=body)).headers
            assert ("send input_type" in headers.get("x-warnings", "")) == warned


@pytest.mark.pool
async def test_a_sparse_query_from_a_table_computes_nothing(http: Any) -> None:
    """The weight of each distinct token; in the table of the fake, a token's id."""
    body = {"input": "cat dog cat", "outputs": ["sparse"], "input_type": "query", "model": "table"}
    item = (await http.post("/v1/embeddings", json=body)).json()["data"][0]
    wanted = sorted(set(fake_ids("cat dog")[1:-1]))
    assert item["sparse"] == {"indices": wanted, "values": wanted}
    assert http.catalog.session("table").batches == []
    both = (await http.post("/v1/embeddings", json={**body, "outputs": ["dense", "sparse"]})).json()["data"][0]
    assert both["sparse"] == item["sparse"]
    assert http.catalog.session("table").outputs == [[contract.EMBEDDING]], "the graph gives the rest alone"
    await http.post("/v1/embeddings", json={**body, "input_type": "document"})
    assert http.catalog.session("table").outputs[1:] == [[contract.SPARSE]]


async def test_documents_are_ranked_by_a_query_from_a_table(http: Any) -> None:
    body = {"query": "cat", "documents": ["dog", "bird"], "weights": {"sparse": 1}, "raw_scores": True, "model": "table"}
    results = (await http.post("/v1/rerank", json=body)).json()["results"]
    session, cat = http.catalog.session("table"), fake_ids("cat")[1]
    assert sorted(row for batch in session.batches for row in batch) == sorted([fake_ids("dog"), fake_ids("bird")])
    scores = [cat * session.row(contract.SPARSE, fake_ids(text))[cat] for text in body["documents"]]
    assert [each["relevance_score"] for each in results] == pytest.approx(sorted(scores, reverse=True))


async def test_a_table_of_another_size_is_refused_when_the_bundle_is_opened(tmp_path: Path) -> None:
    bundle = fake_bundle(tmp_path / "short", **TABLE)
    assert np.array_equal(QueryTable(bundle / "idf.bin", SPARSE_WIDTH).vector({3})[0], [3])
    with pytest.raises(contract.BundleError, match=f"has {4 * SPARSE_WIDTH} bytes, and 7 weights need 28"):
        QueryTable(bundle / "idf.bin", 7)
