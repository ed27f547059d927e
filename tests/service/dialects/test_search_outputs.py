"""Dense vectors, sparse vectors and token matrices from one call, in OpenAI's and TEI's dialects."""

import asyncio
import base64
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from export import contract
from service.runtime.steps import run_in_steps
from tests.service.fakes import HIDDEN, PATIENCE_S, SPARSE_WIDTH, case, client, fake_app, fake_bundle, fake_ids

TEXT = "the cat, the dog."
POINT = fake_ids(".")[1]
KEPT = [at for at, token in enumerate(fake_ids(TEXT)) if at > 0 and token != POINT]
SKIPPED = {
    "sparse": contract.Sparse(size=SPARSE_WIDTH),
    "multivector": contract.MultiVector(width=HIDDEN, skipped_ids=(POINT,), skips_first=True),
}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = fake_app(
        fake_bundle(tmp_path / "three", **SKIPPED),
        fake_bundle(tmp_path / "mini"),
        fake_bundle(tmp_path / "pairs", "reranker"),
        fake_bundle(tmp_path / "names", "token_classifier"),
    )
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


async def test_return_multivector_of_jina_gives_a_vector_for_each_token(http: Any) -> None:
    unit = row(http, contract.MULTIVECTOR)[KEPT].astype(np.float16).astype(np.float32)
    item = await ask(http, return_multivector=True)
    assert np.array_equal(np.float32(item["embeddings"]), unit)
    assert "embedding" not in item
    bits = await ask(http, return_multivector=True, embedding_type="ubinary", dimensions=8)
    assert np.array_equal(bits["embeddings"], np.packbits(unit[:, :8] > 0, axis=1))
    for fields, param in (
        ({"outputs": ["dense"]}, "return_multivector"),
        ({"model": "mini"}, "return_multivector"),
        ({"dimensions": 99}, "dimensions"),
    ):
        with case(fields):
            refused = await http.post("/v1/embeddings", json={"model": "three", "input": TEXT, "return_multivector": True, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_pooling_of_vllm_gives_what_its_task_says(http: Any) -> None:
    async def pooled(**fields: Any) -> Any:
        answer = await http.post("/pooling", json={"model": "three", "input": TEXT, **fields})
        assert answer.status_code == 200, answer.text
        (item,) = answer.json()["data"]
        assert (item["object"], answer.json()["object"]) == ("pooling", "list")
        return item["data"]

    unit = row(http, contract.MULTIVECTOR)[KEPT].astype(np.float16).astype(np.float32)
    assert await pooled(task="embed") == pytest.approx(row(http, contract.EMBEDDING).tolist())
    assert np.array_equal(np.float32(await pooled(task="token_embed")), unit)
    assert np.array_equal(np.frombuffer(base64.b64decode(await pooled(task="token_embed", encoding_format="base64")), "<f4"), unit.ravel())
    tokens = await pooled(task="token_embed", model="mini")
    assert np.allclose(tokens, http.catalog.session("mini").row(contract.TOKEN_EMBEDDINGS, fake_ids(TEXT)))
    scores = np.array(await pooled(task="token_classify", model="names"))
    assert scores.shape == (len(fake_ids(TEXT)), 3)
    assert scores.sum(axis=1) == pytest.approx(np.ones(len(scores)))
    for fields, param in (
        ({"task": "colour"}, "task"),
        ({"task": "token_classify", "model": "names", "dimensions": 2}, "dimensions"),
        ({"dimensions": 99}, "dimensions"),
    ):
        with case(fields):
            refused = await http.post("/pooling", json={"model": "three", "input": TEXT, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


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


async def scored(http: Any, path: str = "/score", **fields: Any) -> list[float]:
    answer = await http.post(path, json={"model": "three", **fields})
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [each["score"] for each in answer.json()["data"]]


async def test_pairs_are_scored_in_the_models_best_way_under_each_name_of_the_fields(http: Any) -> None:
    wanted = pytest.approx(maxsims(http), rel=1e-4)
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert await scored(http, "/v1/score", **{first: QUERY, second: DOCUMENTS}) == wanted
    assert await scored(http, text_1=[QUERY] * 3, text_2=DOCUMENTS) == wanted
    (_, *documents) = await vectors_of(http, [QUERY, *DOCUMENTS])
    assert await scored(http, text_1=QUERY, text_2=documents, weights={"multivector": 1}) == pytest.approx(maxsims(http), rel=1e-3)
    unit = {text: row(http, contract.EMBEDDING, text) for text in ("query: a", "passage: b", "query: c", "passage: d")}
    cosines = [float(unit["query: a"] @ unit["passage: b"]), float(unit["query: c"] @ unit["passage: d"])]
    assert await scored(http, text_1=["a", "c"], text_2=["b", "d"], weights={"dense": 2}) == pytest.approx(cosines, rel=1e-5)
    logits = [float(http.catalog.session("pairs").row(contract.LOGITS, fake_ids(text, "b"))[0]) for text in "ac"]
    pairs = {"model": "pairs", "text_1": ["a", "c"], "text_2": ["b", "b"]}
    assert await scored(http, **pairs, use_activation=False) == pytest.approx(logits)
    assert await scored(http, **pairs) == pytest.approx([1 / (1 + np.exp(-logit)) for logit in logits])


async def test_pairs_that_do_not_match_are_refused(http: Any) -> None:
    for fields, words in (
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "`text_1` has 2 texts and `text_2` has 3"),
        ({"text_1": "a", "text_2": []}, "cannot be empty"),
        ({"text_1": "a", "text_2": {"embedding": [1.0]}, "model": "pairs"}, "is a reranker, which reads texts and no vectors"),
        ({"text_1": "a", "text_2": "b", "model": "pairs", "weights": {"dense": 1}}, "has no `weights`"),
    ):
        with case(fields):
            answer = await http.post("/score", json={"model": "three", **fields})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]


async def test_a_model_of_mean_maxsim_divides_by_the_querys_compared_vectors(tmp_path: Path) -> None:
    about = {"mean": contract.MultiVector(width=HIDDEN, skips_first=True, mean=True)}
    app = fake_app(*(fake_bundle(tmp_path / name, multivector=about.get(name, SKIPPED["multivector"])) for name in ("sum", "mean")))
    async with client(app) as http:
        sums, means = [await scored(http, model=name, text_1=QUERY, text_2=["a dog", "the river"]) for name in ("sum", "mean")]
        n_vectors = len(fake_ids(f"query: {QUERY}")) - 1
        assert means == pytest.approx([each / n_vectors for each in sums], rel=1e-5)


# Vectors in place of texts ---------------------------------------------------------------------------------------------------------------


async def vectors_of(http: Any, texts: list[str], **multivector: Any) -> list[dict[str, Any]]:
    """What `/v1/embeddings` gives of these texts as documents; the first one as a query."""
    prompts = ["query: ", *["passage: "] * (len(texts) - 1)]
    asked = {"outputs": ["dense", "sparse", "multivector"], "multivector": multivector}
    return [await ask(http, input=prompt + text, **asked) for prompt, text in zip(prompts, texts, strict=True)]


@pytest.mark.pool
async def test_vectors_of_texts_rank_as_the_texts_do_and_nothing_is_computed(http: Any) -> None:
    mix = {"dense": 1, "sparse": 0.3, "multivector": 0.5}
    wanted = [await ranked(http, weights=weights, raw_scores=True) for weights in ({"dense": 1}, {"sparse": 1}, {"multivector": 1}, mix)]
    # The fake's query matrix depends on its role only by the prompt, but full stops are compared in queries alone.
    query, *documents = await vectors_of(http, [QUERY, *DOCUMENTS])
    query["multivector"] = {"data": row(http, contract.MULTIVECTOR, f"query: {QUERY}")[1:].tolist(), "dtype": "float32"}
    http.catalog.session("three").forget()
    for weights, (order, raw, _) in zip(({"dense": 1}, {"sparse": 1}, {"multivector": 1}, mix), wanted, strict=True):
        with case(weights):
            found = await ranked(http, query=query, documents=documents, weights=weights, raw_scores=True)
            assert (found[0], found[1]) == (order, pytest.approx(raw, rel=1e-3))
    assert http.catalog.session("three").batches == []
    mixed = await ranked(http, query=query, documents=[documents[0], *DOCUMENTS[1:]], raw_scores=True)
    assert (mixed[0], mixed[1]) == (wanted[2][0], pytest.approx(wanted[2][1], rel=1e-3)), "MaxSim, of vectors and texts together"


async def test_vectors_are_read_in_every_type_in_which_they_are_sent(http: Any) -> None:
    texts = [QUERY, *DOCUMENTS]
    exact = await ranked(http, documents=(await vectors_of(http, texts, dtype="float32"))[1:], raw_scores=True)
    for options, tolerance in (
        ({"dtype": "float16", "encoding_format": "float"}, 1e-2),
        ({"dtype": "int8"}, 0.1),
        ({"dtype": "int8", "encoding_format": "float"}, 0.1),
    ):
        with case(options):
            documents = (await vectors_of(http, texts, **options))[1:]
            if isinstance(documents[0]["multivector"], list):
                documents = [{"multivector": {"data": each["multivector"], "dtype": options["dtype"]}} for each in documents]
            order, raw, _ = await ranked(http, documents=documents, raw_scores=True)
            assert dict(zip(order, raw, strict=True)) == pytest.approx(dict(zip(*exact[:2], strict=True)), abs=tolerance)
    dense = {"weights": {"dense": 1}, "raw_scores": True}
    exact = await ranked(http, **dense)
    for form, tolerance in (("base64", 1e-6), ("int8", 2e-2), ("uint8", 2e-2), ("binary", 0.5), ("ubinary", 0.5)):
        with case(form):
            sent = [await ask(http, input=f"passage: {text}", outputs=["dense"], encoding_format=form) for text in DOCUMENTS]
            order, raw, _ = await ranked(http, documents=[{**each, "encoding_format": form} for each in sent], **dense)
            assert dict(zip(order, raw, strict=True)) == pytest.approx(dict(zip(*exact[:2], strict=True)), abs=tolerance)
    signs = [np.packbits(row(http, contract.EMBEDDING, f"passage: {text}") > 0) for text in DOCUMENTS]
    bits = [np.unpackbits(each) * 2.0 - 1 for each in signs]
    unit = row(http, contract.EMBEDDING, f"query: {QUERY}")
    assert raw == pytest.approx(sorted((float(unit @ each / 4) for each in bits), reverse=True), rel=1e-4)


BAD_VECTORS: list[tuple[Any, str, str]] = [
    ({"embedding": [1.0] * 15}, "15 numbers for a vector, and model three gives 16", "documents.0.embedding"),
    ({"embedding": [0.0] * 16}, "only zeros", "documents.0.embedding"),
    ({"embedding": [1e38] * 16}, "not finite, or larger than 65504", "documents.0.embedding"),
    ({"embedding": "AAAA"}, "3 bytes, which are no numbers of 4 bytes", "documents.0.embedding"),
    ({"embedding": "!"}, "is not base64", "documents.0.embedding"),
    ({"embedding": [300] * 16, "encoding_format": "int8"}, "whole numbers from -128 to 127", "documents.0.embedding"),
    ({"sparse": {"indices": [5, 3], "values": [1, 1]}}, "must ascend, each once", "documents.0.sparse"),
    ({"sparse": {"indices": [3, 3], "values": [1, 1]}}, "must ascend, each once", "documents.0.sparse"),
    ({"sparse": {"indices": [3, 99_999], "values": [1, 1]}}, "must be from 0 to", "documents.0.sparse"),
    ({"sparse": {"indices": [3], "values": [0.0]}}, "must be above 0", "documents.0.sparse"),
    ({"sparse": {"indices": [3], "values": [1, 2]}}, "1 indices and 2 values", "documents.0.sparse"),
    ({"multivector": []}, "no numbers: send at least one", "documents.0.multivector"),
    ({"multivector": [[1.0] * 12, [1.0]]}, "vectors of 1, 12 numbers", "documents.0.multivector"),
    ({"multivector": [[1.0] * 11]}, "11 numbers for a vector, and model three gives 12", "documents.0.multivector"),
    ({"multivector": [[1.0] * 12] * 65}, "65 vectors, and model three gives at most 64", "documents.0.multivector"),
    ({"multivector": {"data": "AAAA", "shape": [1, 12], "dtype": "int8"}}, "3 numbers of the type int8", "documents.0.multivector"),
    ({"multivector": {"data": "AP5/fwD+", "shape": [1, 3]}}, "3 numbers for a vector", "documents.0.multivector"),
    ({}, "one of `embedding`, `sparse` and `multivector`", "documents.0"),
]


async def test_vectors_that_fit_no_model_are_refused_with_the_value_and_the_limit(http: Any) -> None:
    for document, words, field in BAD_VECTORS:
        for path, status in (("/v1/rerank", 422), ("/v2/rerank", 400), ("/rerank", 422)):
            with case((path, document)):
                answer = await http.post(path, json={"model": "three", "query": "a", "documents": [document]})
                assert answer.status_code == status, answer.text
                told = answer.json().get("detail") or answer.json()["message"]
                assert words in told
                assert field in told
    for fields, words in (
        ({"documents": [{"embedding": [1.0] * 16}], "weights": {"sparse": 1}}, "`documents.0` has no sparse vector"),
        ({"documents": [{"embedding": [1.0] * 16}, {"sparse": {"indices": [1], "values": [1]}}]}, "no kind in common"),
        ({"documents": [{"multivector": [[1.0]]}], "model": "mini"}, "it gives: dense, tokens"),
    ):
        with case(fields):
            answer = await http.post("/v1/rerank", json={"model": "three", "query": "a", **fields})
            assert answer.status_code == 422
            assert words in answer.json()["detail"]


async def test_vectors_of_another_space_are_refused(http: Any) -> None:
    body = {"model": "three", "query": {"embedding": [1.0] * 16}, "documents": [{"text": "a cat", "embedding": [1.0] * 16}]}
    good = await http.post("/v1/rerank", json=body)
    assert good.json()["results"] == [{"index": 0, "relevance_score": pytest.approx(1), "document": {"text": "a cat"}}]
    match = {"x-embedding-space-match": good.headers["x-embedding-space"]}
    assert (await http.post("/v1/rerank", json=body, headers=match)).status_code == 200
    moved = await http.post("/v1/rerank", json=body, headers={"x-embedding-space-match": "0" * 16})
    assert moved.status_code == 412
    assert "Embed your documents again" in moved.json()["detail"]


async def test_scoring_ends_when_its_client_has_left() -> None:
    begun, go_on, steps = threading.Event(), threading.Event(), []

    def work() -> Iterator[int]:
        for step in range(3):
            steps.append(step)
            begun.set()
            assert go_on.wait(PATIENCE_S)
            yield step

    scoring = asyncio.create_task(run_in_steps(work()))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert steps == [0]


# next-plaid ------------------------------------------------------------------------------------------------------------------------------


async def test_next_plaid_encodes_and_ranks_texts_and_matrices(http: Any) -> None:
    async def post(path: str, **body: Any) -> Any:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    wanted = maxsims(http)
    order = sorted(range(3), key=lambda at: -wanted[at])
    scores = pytest.approx([wanted[at] for at in order], rel=1e-3)
    query = await post("/encode", texts=[QUERY], input_type="query")
    documents = await post("/encode", texts=DOCUMENTS)
    assert (query["num_texts"], documents["num_texts"], len(query["embeddings"][0])) == (1, 3, len(fake_ids(f"query: {QUERY}")) - 1)
    matrices = [{"embeddings": each} for each in documents["embeddings"]]
    for ranking in (
        await post("/rerank", query=query["embeddings"][0], documents=matrices),
        await post("/rerank_with_encoding", query=QUERY, documents=DOCUMENTS),
    ):
        assert ranking["num_documents"] == 3
        assert ([each["index"] for each in ranking["results"]], [each["score"] for each in ranking["results"]]) == (order, scores)
    half = (await post("/encode", texts=DOCUMENTS, pool_factor=2))["embeddings"]
    assert [len(each) for each in half] == [1 + (len(each) - 1) // 2 for each in documents["embeddings"]]
    assert len((await post("/encode", texts=[QUERY], input_type="query", pool_factor=2))["embeddings"][0]) == len(query["embeddings"][0])
    pooled = await post("/rerank_with_encoding", query=QUERY, documents=DOCUMENTS, pool_factor=2)
    again = await post("/rerank", query=query["embeddings"][0], documents=[{"embeddings": each} for each in half])
    assert [each["score"] for each in pooled["results"]] == pytest.approx([each["score"] for each in again["results"]], rel=1e-3)
    item = await ask(
        http, input=DOCUMENTS[0], input_type="document", outputs=["multivector"], multivector={"pool_factor": 2, "encoding_format": "float"}
    )
    assert np.array(item["multivector"]) == pytest.approx(np.array(half[0]), abs=1e-3)


async def test_next_plaid_refuses_in_its_own_form(http: Any) -> None:
    for path, body, words in (
        ("/encode", {"texts": []}, "cannot be empty"),
        ("/encode", {"texts": ["a"], "pool_factor": 0.5}, "greater than or equal to 1"),
        ("/encode", {"texts": ["a"], "model": "mini"}, "model mini gives no 'multivector'"),
        ("/rerank", {"query": [[1.0]], "documents": [{"embeddings": [[1.0]]}]}, "`query.multivector` has 1 numbers for a vector"),
        ("/rerank", {"query": [[1.0] * 12], "documents": []}, "cannot be empty"),
        ("/rerank_with_encoding", {"query": "", "documents": ["a"]}, "cannot be empty"),
    ):
        with case((path, body)):
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "VALIDATION_ERROR")
            assert words in answer.json()["message"]


# Arrow -----------------------------------------------------------------------------------------------------------------------------------

ARROW = {"accept": "application/vnd.apache.arrow.stream"}


async def test_an_arrow_table_has_the_numbers_of_the_json_answer(http: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    body = {"model": "three", "input": [*DOCUMENTS, "cat " * 99], "outputs": ["dense", "sparse", "multivector"], "truncate": False}
    body |= {"sparse": {"top_k": 4}, "multivector": {"dimensions": 8}, "dimensions": 8}
    answer = await http.post("/v1/embeddings", json=body, headers={**ARROW, "x-item-errors": "true"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW["accept"]
    table = pa.ipc.open_stream(answer.content).read_all()
    fixed = [pa.list_(pa.float32(), 8), pa.list_(pa.list_(pa.float16(), 8))]
    lists = pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == {
        **{"index": pa.int32(), "embedding": fixed[0], "sparse": lists, "multivector": fixed[1], "error": pa.string()}
    }
    assert table.schema.metadata[b"model"] == b"three"
    assert table.schema.metadata[b"space"].decode() == answer.headers["x-embedding-space"]
    in_lists = {**body["multivector"], "encoding_format": "float"}
    told = await http.post("/v1/embeddings", json={**body, "multivector": in_lists}, headers={"x-item-errors": "true"})
    *good, failed = told.json()["data"]
    *rows, last = table.to_pylist()
    assert (last["embedding"], last["sparse"], last["multivector"], last["error"]) == (None, None, None, failed["error"]["message"])
    for row_, item in zip(rows, good, strict=True):
        assert (row_["index"], row_["error"], row_["sparse"]["indices"]) == (item["index"], None, item["sparse"]["indices"])
        assert row_["embedding"] == pytest.approx(item["embedding"])
        assert row_["sparse"]["values"] == pytest.approx(item["sparse"]["values"])
        assert np.array(row_["multivector"], np.float32) == pytest.approx(np.array(item["multivector"]), abs=1e-3)


async def test_a_table_needs_pyarrow_and_has_float_vectors(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for fields in ({"encoding_format": "int8"}, {"multivector": {"dtype": "int8"}}, {"chunks": {}}):
        answer = await http.post("/v1/embeddings", json={"model": "three", "input": TEXT, **fields}, headers=ARROW)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "accept")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    http.catalog.session("mini").forget()
    answer = await http.post("/v1/embeddings", json={"model": "mini", "input": TEXT}, headers=ARROW)
    assert answer.status_code == 406
    assert "install attnserve[arrow]" in answer.json()["error"]["message"]
    assert http.catalog.session("mini").batches == []


# Qdrant ----------------------------------------------------------------------------------------------------------------------------------


async def test_qdrant_takes_the_vectors_as_they_are_and_scores_them_alike(http: Any) -> None:
    pytest.importorskip("qdrant_client", reason="the extra `test` has it")
    from qdrant_client import QdrantClient, models

    query, *documents = [
        await ask(
            http,
            input=text,
            input_type=role,
            outputs=["dense", "sparse", "multivector"],
            multivector={"encoding_format": "float", "dtype": "float32"},
        )
        for role, text in [("query", QUERY), *(("document", text) for text in DOCUMENTS)]
    ]
    store = QdrantClient(":memory:")
    maxsim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    store.create_collection(
        "texts",
        vectors_config={
            "dense": models.VectorParams(size=16, distance=models.Distance.COSINE),
            "colbert": models.VectorParams(size=HIDDEN, distance=models.Distance.DOT, multivector_config=maxsim),
        },
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )
    for at, item in enumerate(documents):
        vector = {"dense": item["embedding"], "sparse": models.SparseVector(**item["sparse"]), "colbert": item["multivector"]}
        store.upsert("texts", [models.PointStruct(id=at, vector=vector)])
    for using, way, vector in (
        ("dense", "dense", query["embedding"]),
        ("sparse", "sparse", models.SparseVector(**query["sparse"])),
        ("colbert", "multivector", query["multivector"]),
    ):
        with case(way):
            points = store.query_points("texts", query=vector, using=using).points
            order, raw, _ = await ranked(http, query=query, documents=documents, weights={way: 1}, raw_scores=True)
            assert ([point.id for point in points], [point.score for point in points]) == (order, pytest.approx(raw, rel=1e-4))
