"""Cohere's `/v2/embed` and `/v2/rerank`, by hand and through the real cohere-python client."""

import asyncio
import base64
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import pytest
import pytest_asyncio
from fastapi import FastAPI

from export import contract
from service.dialects.cohere import CohereRerankResponse, EmbedResponse
from tests.service.fakes import WIDTH, FakeSession, client, fake_app, fake_bundle, fake_ids, serve_in_thread


def vector(text: str) -> np.ndarray:
    return FakeSession().row(contract.EMBEDDING, fake_ids(text))


def logit(query: str, document: str) -> float:
    return float(FakeSession().row(contract.LOGITS, fake_ids(query, document))[0])


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, where: str) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("cohere")
    bundles = fake_bundle(folder / "enc"), fake_bundle(folder / "ranker", "reranker"), fake_bundle(folder / "labels", "classifier")
    async with client(fake_app(*bundles, threads=1, max_client_batch=101, cache_bytes=0)) as running:
        yield running


def embed(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"model": "enc", "input_type": "search_document", "texts": texts, **fields}


# Embed -----------------------------------------------------------------------------------------------------------------------------------


async def test_embed_answers_every_type_from_one_run(http: httpx.AsyncClient, app: FastAPI) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    response = await http.post("/v2/embed", json=embed("the cat", "a dog", embedding_types=types))
    assert response.status_code == 200
    body = response.json()
    EmbedResponse.model_validate(body)
    assert list(body["embeddings"]) == types
    assert body["id"] == response.headers["x-request-id"]
    assert body["response_type"] == "embeddings_by_type"
    assert body["texts"] == ["the cat", "a dog"]
    tokens = len(fake_ids("passage: the cat")) + len(fake_ids("passage: a dog"))
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens},
        "truncated": [],
    }
    assert sum(map(len, app.state.catalog.session("enc").batches)) == 2
    for at, text in enumerate(("passage: the cat", "passage: a dog")):
        wanted = vector(text)
        assert np.float32(body["embeddings"]["float"][at]).tolist() == wanted.tolist()
        assert np.frombuffer(base64.b64decode(body["embeddings"]["base64"][at]), "<f4").tolist() == wanted.tolist()
        assert np.unpackbits(np.uint8(body["embeddings"]["ubinary"][at])).tolist() == (wanted > 0).astype(int).tolist()
        assert body["embeddings"]["binary"][at] == [byte - 128 for byte in body["embeddings"]["ubinary"][at]]
        assert body["embeddings"]["uint8"][at] == [number + 128 for number in body["embeddings"]["int8"][at]]


@pytest.mark.parametrize(
    ("prompts", "default", "input_type", "prompt"),
    [
        ({"query": "q: ", "document": "d: "}, None, "search_query", "q: "),
        ({"query": "q: ", "document": "d: "}, None, "search_document", "d: "),
        ({"query": "q: ", "passage": "p: "}, None, "search_document", "p: "),
        ({"search_query": "sq: ", "search_document": "sd: "}, None, "search_query", "sq: "),
        ({"search_query": "sq: ", "search_document": "sd: "}, None, "search_document", "sd: "),
        ({"clustering": "cl: "}, None, "clustering", "cl: "),
        ({"query": "q: "}, None, "classification", ""),
        ({"query": "q: ", "any": "a: "}, "any", "classification", "a: "),
    ],
)
async def test_input_type_chooses_the_prompt(
    tmp_path: Path, prompts: dict[str, str], default: str | None, input_type: str, prompt: str
) -> None:
    app = fake_app(fake_bundle(tmp_path / "enc", prompts=prompts, default_prompt=default))
    async with client(app) as http:
        assert (await http.post("/v2/embed", json=embed("the cat", input_type=input_type))).status_code == 200
        assert app.state.catalog.session("enc").batches == [[fake_ids(prompt + "the cat")]]


@pytest.mark.parametrize(("truncate", "kept"), [("END", "one two"), ("START", "four five")])
async def test_a_long_text_is_cut_at_the_end_that_was_named(http: httpx.AsyncClient, app: FastAPI, truncate: str, kept: str) -> None:
    request = embed("the cat", "one two three four five", input_type="clustering", truncate=truncate, max_tokens=4)
    response = await http.post("/v2/embed", json=request)
    assert [fake_ids("the cat"), fake_ids(kept)] == [row for batch in app.state.catalog.session("enc").batches for row in batch]
    meta = response.json()["meta"]
    assert meta["truncated"] == [{"index": 1, "tokens": 7, "kept": 4}]
    assert "cut" in meta["warnings"][0]
    assert response.headers["x-truncated-inputs"] == "1; 1:7>4"


async def test_failed_texts_are_null_where_that_was_asked_for(http: httpx.AsyncClient) -> None:
    request = embed("the cat", "", embedding_types=["float", "base64"])
    body = (await http.post("/v2/embed", json=request, headers={"x-item-errors": "1"})).json()
    EmbedResponse.model_validate(body)
    assert body["embeddings"]["float"][1] is None
    assert body["embeddings"]["base64"][1] is None
    assert len(body["embeddings"]["float"][0]) == WIDTH
    assert body["meta"]["errors"] == [{"index": 1, "message": "input 1 cannot be empty"}]


async def expect_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any], rows: list[tuple[dict[str, Any], int, str]]) -> None:
    for change, status, said in rows:
        response = await http.post(path, json={**body, **change})
        assert (response.status_code, list(response.json())) == (status, ["message"]), change
        assert said in response.json()["message"], change


async def test_embed_refuses(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], int, str]] = [
        ({"texts": []}, 400, "texts"),
        ({"texts": ["a", ""]}, 400, "empty"),
        ({"texts": ["a"] * 102}, 400, "batch size 102 > maximum allowed batch size 101"),
        ({"images": ["data:image/png;base64,AA"]}, 400, "text and no images"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, 400, "cannot be combined"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, 400, "inputs.0.content.0.type"),
        ({"input_type": "image"}, 400, "text and no images"),
        ({"input_type": "poem"}, 400, "input_type"),
        ({"truncate": "NONE", "texts": ["the cat " * 100]}, 400, "tokens"),
        ({"output_dimension": WIDTH + 1}, 400, "output_dimension"),
        ({"output_dimension": 4, "embedding_types": ["binary"]}, 400, "multiple of 8"),
        ({"embedding_types": ["float16"]}, 400, "embedding_types"),
        ({"priority": -1}, 400, "priority"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "ranker"}, 400, "ranker"),
    ]
    await expect_refused(http, "/v2/embed", embed("a"), rows)


# Rerank ----------------------------------------------------------------------------------------------------------------------------------

DOCUMENTS = ["a dog", "the cat", "red fish", "green bird"]


def rerank(*documents: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "ranker", "query": "where is the cat", "documents": documents, **fields}


async def test_rerank_gives_sigmoids_of_logits_best_first(http: httpx.AsyncClient) -> None:
    response = await http.post("/v2/rerank", json=rerank(*DOCUMENTS))
    assert response.status_code == 200
    body = response.json()
    CohereRerankResponse.model_validate(body)
    logits = [logit("where is the cat", document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -logits[index])
    assert body["results"] == [{"index": index, "relevance_score": pytest.approx(sigma(logits[index]), abs=1e-15)} for index in order]
    tokens = sum(len(fake_ids("where is the cat", document)) for document in DOCUMENTS)
    assert body["id"] == response.headers["x-request-id"]
    assert body["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": tokens},
        "truncated": [],
    }


async def test_documents_may_be_objects_and_top_n_keeps_the_best(http: httpx.AsyncClient) -> None:
    every = (await http.post("/v2/rerank", json=rerank(*DOCUMENTS))).json()["results"]
    request = rerank(*({"text": document, "title": "ignored"} for document in DOCUMENTS), top_n=2)
    assert (await http.post("/v2/rerank", json=request)).json()["results"] == every[:2]


async def test_scores_that_saturate_still_stand_in_the_order_of_their_logits(http: httpx.AsyncClient, app: FastAPI) -> None:
    query = "where is the cat"
    logits = {"one": -800.0, "two": 40.0, "three": 50.0, "four": 40.0}
    app.state.catalog.session("ranker").bad_rows = {tuple(fake_ids(query, document)): number for document, number in logits.items()}
    results = (await http.post("/v2/rerank", json=rerank(*logits))).json()["results"]
    assert [result["index"] for result in results] == [2, 1, 3, 0]
    assert [result["relevance_score"] for result in results] == [1.0, 1.0, 1.0, 0.0]
    raw = (await http.post("/v2/rerank", json=rerank(*logits, raw_scores=True))).json()["results"]
    assert [result["relevance_score"] for result in raw] == [50.0, 40.0, 40.0, -800.0]


async def test_max_tokens_per_doc_cuts_the_document_alone_and_says_so(http: httpx.AsyncClient, app: FastAPI) -> None:
    response = await http.post("/v2/rerank", json=rerank("one two three four", "one", max_tokens_per_doc=2))
    query = "where is the cat"
    assert sorted(row for batch in app.state.catalog.session("ranker").batches for row in batch) == sorted(
        [fake_ids(query, "one two"), fake_ids(query, "one")]
    )
    whole, kept = len(fake_ids(query, "one two three four")), len(fake_ids(query, "one two"))
    assert response.json()["meta"]["truncated"] == [{"index": 0, "tokens": whole, "kept": kept}]
    assert response.headers["x-truncated-inputs"] == f"1; 0:{whole}>{kept}"


async def test_a_hundred_documents_are_one_search_unit(http: httpx.AsyncClient) -> None:
    for count, units in ((100, 1), (101, 2)):
        body = (await http.post("/v2/rerank", json=rerank(*(f"bird {number}" for number in range(count))))).json()
        assert body["meta"]["billed_units"] == {"search_units": units}


async def test_an_encoder_ranks_by_cosine_and_a_warning_says_so(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "enc"))) as http:
        body = (await http.post("/v2/rerank", json=rerank(*DOCUMENTS, model=None))).json()
        raw = (await http.post("/v2/rerank", json=rerank(*DOCUMENTS, model=None, raw_scores=True))).json()
    query = vector("query: where is the cat").astype(np.float64)
    cosines = [float(vector(f"passage: {document}").astype(np.float64) @ query) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -cosines[index])
    assert [result["index"] for result in body["results"]] == order
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == pytest.approx([(1 + cosines[index]) / 2 for index in order], abs=1e-12)
    assert [result["relevance_score"] for result in raw["results"]] == pytest.approx([cosines[index] for index in order], abs=1e-12)
    assert "encoder, not a reranker" in body["meta"]["warnings"][0]


async def test_a_long_query_of_an_encoder_is_cut_and_the_warning_says_so(http: httpx.AsyncClient) -> None:
    response = await http.post("/v2/rerank", json=rerank("one", "dog " * 100, model="enc", query="cat " * 100))
    body, n_tokens = response.json(), len(fake_ids("query: " + "cat " * 100))
    assert response.headers["x-truncated-inputs"].startswith(f"2; query:{n_tokens}>64, 1:")
    assert f"the query was cut: it has {n_tokens} tokens and 64 were kept" in body["meta"]["warnings"]
    assert [cut["index"] for cut in body["meta"]["truncated"]] == [1]


async def test_rerank_refuses(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], int, str]] = [
        ({"documents": []}, 400, "documents"),
        ({"documents": [{"title": "no text"}]}, 400, "documents.0"),
        ({"query": ""}, 400, "query"),
        ({"top_n": -1}, 400, "top_n"),
        ({"max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
        ({"documents": ["a", ""], "model": "enc"}, 400, "empty"),
        ({"documents": ["a"] * 102}, 400, "batch size 102"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "labels"}, 400, "labels"),
    ]
    await expect_refused(http, "/v2/rerank", rerank("a"), rows)


@pytest.mark.pool
async def test_priority_0_passes_a_higher_number(http: httpx.AsyncClient, app: FastAPI) -> None:
    session, engine = app.state.catalog.session("enc"), app.state.catalog.computing("enc")

    async def send(text: str, priority: int) -> asyncio.Task[httpx.Response]:
        queued = engine.queued_tokens
        task = asyncio.create_task(http.post("/v2/embed", json=embed(text, input_type="clustering", priority=priority)))
        for _ in range(1000):  # turns of the loop
            if engine.queued_tokens > queued:
                return task
            await asyncio.sleep(0)
        raise AssertionError(f"{text!r} never reached the queue")

    session.hold()
    tasks = [await send("the cat", 0)]
    await session.entered(1)
    tasks += [await send("a dog", 7), await send("a bird", 0)]
    session.open()
    assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200, 200]
    assert session.batches == [[fake_ids("the cat")], [fake_ids("a bird")], [fake_ids("a dog")]]


# The real client -------------------------------------------------------------------------------------------------------------------------


async def test_embed_reads_inputs_in_blocks_of_text(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "enc"))) as http:
        blocks = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "a dog"}]
        by_inputs = {"model": "enc", "input_type": "search_query", "inputs": [{"content": blocks}, {"content": blocks[:1]}]}
        by_texts = {"model": "enc", "input_type": "search_query", "texts": ["the cat\na dog", "the cat"]}
        wanted, got = [(await http.post("/v2/embed", json=body)).json() for body in (by_texts, by_inputs)]
    assert (got["embeddings"], got["texts"]) == (wanted["embeddings"], wanted["texts"])


def test_version_1_of_the_official_client(tmp_path: Path) -> None:
    bundles = fake_bundle(tmp_path / "enc"), fake_bundle(tmp_path / "ranker", "reranker")
    texts = {"texts": ["the cat", "a dog"], "model": "enc", "input_type": "search_query"}
    with (
        serve_in_thread(fake_app(*bundles)) as url,
        cohere.Client(api_key="none", base_url=url) as official,
        cohere.ClientV2(api_key="none", base_url=url) as newer,
    ):
        floats: Any = official.embed(**texts, batching=False)  # type: ignore[arg-type]
        wanted: Any = newer.embed(**texts, embedding_types=["float", "int8"])  # type: ignore[arg-type]
        assert floats.response_type == "embeddings_floats"
        np.testing.assert_allclose(floats.embeddings, wanted.embeddings.float_)
        by_type: Any = official.embed(**texts, embedding_types=["int8"], batching=False)  # type: ignore[arg-type]
        assert by_type.embeddings.int8 == wanted.embeddings.int8
        documents: Any = ["paris", {"text": "berlin"}]
        ranked: Any = official.rerank(query="capital", documents=documents, model="ranker", top_n=2, return_documents=True)
        by_v2 = newer.rerank(query="capital", documents=["paris", "berlin"], model="ranker")
        assert [one.index for one in ranked.results] == [one.index for one in by_v2.results]
        assert {one.document.text for one in ranked.results} == {"paris", "berlin"}
        assert ranked.meta.billed_units.search_units == 1
        with pytest.raises(cohere.UnprocessableEntityError, match="max_chunks_per_doc"):
            official.rerank(query="a", documents=["b"], model="ranker", max_chunks_per_doc=3)
