"""Dense vectors, sparse vectors and token matrices from one call, in OpenAI's and TEI's dialects."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from export import contract
from tests.service.fakes import HIDDEN, SPARSE_WIDTH, case, client, fake_app, fake_bundle, fake_ids

TEXT = "the cat, the dog."
POINT = fake_ids(".")[1]
KEPT = [at for at, token in enumerate(fake_ids(TEXT)) if at > 0 and token != POINT]
SKIPPED = {
    "sparse": contract.Sparse(size=SPARSE_WIDTH),
    "multivector": contract.MultiVector(width=HIDDEN, skipped_ids=(POINT,), skips_first=True),
}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = fake_app(fake_bundle(tmp_path / "three", **SKIPPED), fake_bundle(tmp_path / "mini"))
    async with client(app) as made:
        made.catalog = app.state.catalog  # type: ignore[attr-defined]
        yield made


def row(http: Any, output: str, text: str = TEXT) -> Any:
    return http.catalog.session("three").row(output, fake_ids(text))


async def ask(http: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await http.post("/v1/embeddings", json={"model": "three", "input": TEXT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]


@pytest.mark.pool
async def test_one_call_gives_a_dense_vector_a_sparse_vector_and_a_token_matrix_from_one_row(http: Any) -> None:
    item = await ask(http, outputs=["dense", "sparse", "multivector"], sparse={"return_tokens": True})
    assert item["embedding"] == pytest.approx(row(http, contract.EMBEDDING).tolist())
    weights, sparse = row(http, contract.SPARSE), item["sparse"]
    assert sparse["indices"] == np.flatnonzero(weights).tolist()
    assert sparse["values"] == pytest.approx(weights[weights > 0].tolist())
    assert sparse["tokens"] == [http.catalog.get("three").tokenizer.id_to_token(index) for index in sparse["indices"]]
    ids, matrix = fake_ids(TEXT), item["multivector"]
    sent = np.frombuffer(base64.b64decode(matrix["data"]), "<f2").reshape(matrix["shape"])
    assert matrix["dtype"] == "float16"
    assert np.array_equal(sent, row(http, contract.MULTIVECTOR)[KEPT].astype(np.float16)), "neither the first token nor the full stop"
    assert http.catalog.session("three").batches == [[ids]], "one row of one run"


async def test_numbers_and_dimensions_of_each_output(http: Any) -> None:
    weights = row(http, contract.SPARSE)
    item = await ask(http, outputs=["sparse"], sparse={"top_k": 3, "min_weight": 0.01})
    assert item["sparse"]["indices"] == sorted(np.argsort(-weights, kind="stable")[:3].tolist())
    assert "embedding" not in item
    unit = row(http, contract.MULTIVECTOR)[KEPT].astype(np.float16).astype(np.float32)
    for options, numbers, dtype in (
        ({"dtype": "float32"}, unit, "<f4"),
        ({"dimensions": 4}, unit[:, :4] / np.linalg.norm(unit[:, :4], axis=1, keepdims=True), "<f2"),
        ({"dtype": "ubinary", "dimensions": 8}, np.packbits(unit[:, :8] > 0, axis=1), "u1"),
    ):
        with case(options):
            matrix = (await ask(http, outputs=["multivector"], multivector=options))["multivector"]
            sent = np.frombuffer(base64.b64decode(matrix["data"]), dtype).reshape(matrix["shape"])
            assert np.allclose(sent, numbers, atol=1e-3)
    lists = (await ask(http, outputs=["multivector"], multivector={"encoding_format": "float", "dtype": "int8"}))["multivector"]
    assert np.abs(lists).max(axis=1).tolist() == [127] * len(unit)


async def test_what_cannot_be_given_is_refused_with_the_value_and_what_can(http: Any) -> None:
    for fields, words, param in (
        ({"outputs": ["sparse"], "model": "mini"}, "model mini gives no 'sparse'; it gives: dense, tokens", "outputs"),
        ({"outputs": []}, "at least one output", "outputs"),
        ({"outputs": ["dense", "dense"]}, "each once. Given: dense, dense", "outputs"),
        ({"outputs": ["colour"]}, "'dense', 'sparse' or 'multivector'", "outputs.0"),
        ({"outputs": ["sparse"], "sparse": {"dimensions": 8}}, "dimensions", "sparse.dimensions"),
        ({"outputs": ["sparse"], "sparse": {"top_k": 0}}, "greater than or equal to 1", "sparse.top_k"),
        ({"outputs": ["multivector"], "multivector": {"dimensions": 99}}, f"between 1 and {HIDDEN}", "multivector.dimensions"),
        ({"outputs": ["multivector"], "multivector": {"dtype": "binary"}}, "12 is not a multiple of 8", "dimensions"),
    ):
        with case(fields):
            answer = await http.post("/v1/embeddings", json={"model": "three", "input": TEXT, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert words in error["message"]


async def test_tei_sends_weights_by_index_and_refuses_models_without_them(http: Any) -> None:
    answer = await http.post("/embed_sparse", json={"model": "three", "inputs": [TEXT, "cat"]})
    first = answer.json()[0]
    weights = row(http, contract.SPARSE)
    assert [each["index"] for each in first] == np.flatnonzero(weights).tolist()
    assert [each["value"] for each in first] == pytest.approx(weights[weights > 0].tolist())
    refused = await http.post("/embed_sparse", json={"model": "mini", "inputs": TEXT})
    assert refused.status_code == 424
    assert "model mini gives no sparse vectors; it gives: dense, tokens" in refused.json()["error"]


async def test_models_say_what_they_give(http: Any) -> None:
    about = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert about["mini"]["outputs"] == ["dense", "tokens"]
    assert about["three"]["outputs"] == ["dense", "sparse", "multivector", "tokens"]
    assert (about["three"]["sparse_width"], about["three"]["multivector_width"]) == (SPARSE_WIDTH, HIDDEN)
    assert (await http.get("/info", params={"model": "three"})).json()["outputs"] == about["three"]["outputs"]


# Ranking ---------------------------------------------------------------------------------------------------------------------------------

QUERY, DOCUMENTS = "the capital.", ["paris is a capital", "a dog. a cat.", "the river"]


async def ranked(http: Any, **fields: Any) -> tuple[list[int], list[float], list[str]]:
    answer = await http.post("/v1/rerank", json={"model": "three", "query": QUERY, "documents": DOCUMENTS, **fields})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    return [each["index"] for each in results], [each["relevance_score"] for each in results], answer.json()["warnings"]


def maxsims(http: Any) -> list[float]:
    """The definition, in float64: sum over the query's vectors of the largest dot product; a document's full stops have no vectors."""

    def matrix(text: str, skipped: int) -> Any:
        ids = fake_ids(text)
        whole = row(http, contract.MULTIVECTOR, text).astype(np.float16).astype(np.float64)
        return np.array([vector for at, vector in enumerate(whole) if at > 0 and ids[at] != skipped])

    query = matrix(f"query: {QUERY}", -1)
    return [max_over(query, matrix(f"passage: {text}", POINT)) for text in DOCUMENTS]


def max_over(query: Any, document: Any) -> float:
    return float(sum(max(float(q @ d) for d in document) for q in query))


async def test_an_encoder_with_token_matrices_ranks_by_maxsim(http: Any) -> None:
    wanted = maxsims(http)
    best = sorted(range(3), key=lambda at: -wanted[at])
    order, raw, warnings = await ranked(http, raw_scores=True)
    assert (order, raw) == (best, pytest.approx([wanted[at] for at in best], rel=1e-4))
    n_vectors = len(fake_ids(f"query: {QUERY}")) - 1
    assert (await ranked(http))[1] == pytest.approx([(1 + wanted[at] / n_vectors) / 2 for at in best], rel=1e-4)
    assert "MaxSim" in warnings[0]


async def test_another_query_computes_the_query_alone(http: Any) -> None:
    await ranked(http)
    http.catalog.session("three").forget()
    await ranked(http, query="a dog")
    assert http.catalog.session("three").batches == [[fake_ids("query: a dog")]]


async def test_scores_are_mixed_by_the_requests_weights(http: Any) -> None:
    n_vectors = len(fake_ids(f"query: {QUERY}")) - 1
    mixed = []
    for text, maxsim in zip(DOCUMENTS, maxsims(http), strict=True):
        dense, weights = (
            float(row(http, output, f"query: {QUERY}").astype(np.float64) @ row(http, output, f"passage: {text}").astype(np.float64))
            for output in (contract.EMBEDDING, contract.SPARSE)
        )
        mixed.append(dense + 0.3 * weights + 0.5 * maxsim / n_vectors)
    order, raw, _ = await ranked(http, weights={"dense": 1, "sparse": 0.3, "multivector": 0.5}, raw_scores=True)
    assert order == sorted(range(3), key=lambda at: -mixed[at])
    assert raw == pytest.approx(sorted(mixed, reverse=True), rel=1e-4)
    scores = (await ranked(http, weights={"sparse": 2}))[1]
    assert scores == sorted(scores, reverse=True)
    assert 0 <= min(scores) <= max(scores) < 1


async def test_weights_that_weigh_nothing_are_refused(http: Any) -> None:
    for weights, model, words in (
        ({"dense": 0, "sparse": 0}, "three", "at least one of dense, sparse and multivector must be above 0"),
        ({"sparse": 1}, "mini", "model mini gives no 'sparse'; it gives: dense, tokens"),
        ({"dense": -1}, "three", "greater than or equal to 0"),
    ):
        with case(weights):
            answer = await http.post("/v1/rerank", json={"model": model, "query": "a", "documents": ["b"], "weights": weights})
            assert answer.status_code in (400, 422)
            assert words in answer.json()["detail"]
