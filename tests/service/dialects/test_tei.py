"""The text-embeddings-inference dialect: field by field, error by error, and through huggingface_hub's own client."""

import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from export import contract
from service.dialects.tei.routes import render
from service.errors import DeadlineExceeded, NeverFits, NotReady, Overloaded, RouteNotFound, RuntimeFailed, ServiceError
from tests.service.fakes import HIDDEN, WIDTH, FakeSession, app_of, client, fake_app, fake_bundle, fake_ids, serve_in_thread

# A score is computed in float64 from the same float32 logit on both sides, so only the last bits may differ.
SCORE_TOLERANCE = 1e-12
# float32 numbers survive JSON exactly; what was normalised again is off by rounding.
FLOAT32_TOLERANCE = 1e-6

MAX_TOKENS = 16
MODELS = ("encoder", "reranker", "classifier", "token_classifier")


def bundles(folder: Path) -> list[Path]:
    """One of each kind, the encoder first, and a classifier of several labels at a time."""
    made = [fake_bundle(folder / kind, kind, max_tokens=MAX_TOKENS) for kind in MODELS]  # type: ignore[arg-type]
    return [*made, fake_bundle(folder / "tags", "classifier", score_activation="sigmoid", id2label={0: "red", 1: "green", 2: "blue"})]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, where: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client(fake_app(*bundles(tmp_path_factory.mktemp("tei")), cache_bytes=0)) as connection:
        yield connection


def session(http: httpx.AsyncClient, name: str) -> FakeSession:
    fake: FakeSession = app_of(http).state.catalog.session(name)
    return fake


def row(http: httpx.AsyncClient, output: str, token_ids: list[int], model: str = "encoder") -> np.ndarray:
    return session(http, model).row(output, token_ids)


def logits(http: httpx.AsyncClient, model: str, text: str, pair: str | None = None) -> np.ndarray:
    return row(http, contract.LOGITS, fake_ids(text, pair), model).astype(np.float64)


def assert_error(response: httpx.Response, status: int, kind: str, text: str = "") -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == kind
    assert text in body["error"]


# /embed ----------------------------------------------------------------------------------------------------------------------------------


async def test_embed_takes_texts_and_ids_and_answers_a_list_of_vectors(http: httpx.AsyncClient) -> None:
    rows: list[tuple[Any, list[list[int]]]] = [
        ("the cat", [fake_ids("the cat")]),
        (["the cat"], [fake_ids("the cat")]),
        (["the cat", "a dog", "the cat"], [fake_ids("the cat"), fake_ids("a dog"), fake_ids("the cat")]),
        ([2, 4, 3], [[2, 4, 3]]),
        (["the cat", [2, 4, 3]], [fake_ids("the cat"), [2, 4, 3]]),
        ([[2, 4, 3], [2, 5, 6, 3]], [[2, 4, 3], [2, 5, 6, 3]]),
    ]
    for inputs, expected in rows:
        response = await http.post("/embed", json={"inputs": inputs})
        assert response.status_code == 200
        wanted = [row(http, contract.EMBEDDING, each) for each in expected]
        np.testing.assert_array_equal(np.array(response.json(), np.float32), wanted)


async def test_what_is_wrong_with_a_request_is_a_validation_error(http: httpx.AsyncClient) -> None:
    for field in (
        {"dimensions": 0},
        {"dimensions": WIDTH + 1},
        {"dimensions": 1.5},
        {"dimensions": "5"},
        {"truncate": "true"},
        {"truncation_direction": "up"},
        {"normalize": 1},
        {"prompt_name": 5},
        {"prompt_name": "x" * 257},
    ):
        assert_error(await http.post("/embed", json={"inputs": "a", **field}), 422, "Validation", next(iter(field)))


async def test_a_prompt_by_its_name_stands_before_the_text(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed", json={"inputs": "the cat", "prompt_name": "query"})
    np.testing.assert_array_equal(np.array(response.json()[0], np.float32), row(http, contract.EMBEDDING, fake_ids("query: the cat")))
    assert_error(await http.post("/embed", json={"inputs": "a", "prompt_name": "nobody"}), 422, "Validation", "query")
    assert_error(await http.post("/embed", json={"inputs": [2, 3], "prompt_name": "query"}), 422, "Validation", "prompt")


LONG = " ".join(["cat", *["the"] * 20, "dog"])


async def test_a_long_text_loses_tokens_on_the_side_asked_for(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["cat", *["the"] * 13]),
        ({"truncate": None}, ["cat", *["the"] * 13]),
        ({"truncate": True}, ["cat", *["the"] * 13]),
        ({"truncate": True, "truncation_direction": "right"}, ["cat", *["the"] * 13]),
        ({"truncate": True, "truncation_direction": "Left"}, [*["the"] * 13, "dog"]),
        ({"truncation_direction": "left"}, [*["the"] * 13, "dog"]),
    ]
    for options, kept in rows:
        response = await http.post("/embed", json={"inputs": LONG, **options})
        np.testing.assert_array_equal(np.array(response.json()[0], np.float32), row(http, contract.EMBEDDING, fake_ids(" ".join(kept))))
        assert response.headers["x-truncated-inputs"] == "1; 0:24>16"


async def test_a_long_text_that_must_not_be_cut_is_a_validation_error_with_the_text_clients_look_for(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed", json={"inputs": ["a", LONG], "truncate": False})
    assert_error(response, 422, "Validation")
    assert re.match(r"`inputs` must have less than \d+ tokens. Given: 24", response.json()["error"])


async def test_without_auto_truncate_a_long_text_is_refused_unless_the_request_allows_the_cut(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "encoder", max_tokens=MAX_TOKENS), auto_truncate=False)) as http:
        assert_error(await http.post("/embed", json={"inputs": LONG}), 422, "Validation", "must have less than")
        assert (await http.post("/embed", json={"inputs": LONG, "truncate": True})).status_code == 200
        assert (await http.get("/info")).json()["auto_truncate"] is False


async def test_nothing_to_embed_is_an_empty_error_for_the_whole_request(http: httpx.AsyncClient) -> None:
    for inputs in ("", [], [""], ["the cat", ""], [[]], ["the cat", []]):
        assert_error(await http.post("/embed", json={"inputs": inputs}), 400, "Empty", "`inputs` cannot be empty")


async def test_ids_outside_the_vocabulary_are_a_tokenizer_error(http: httpx.AsyncClient) -> None:
    assert_error(await http.post("/embed", json={"inputs": [[2, 3], [2, 99_999, 3]]}), 422, "Tokenizer", "99999")


async def test_success_says_in_its_headers_what_it_took(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed", json={"inputs": ["the cat", "a dog!"]})
    headers = response.headers
    assert headers["x-compute-type"] == "cpu+optimized"
    assert headers["x-compute-characters"] == "13"
    assert headers["x-compute-tokens"] == str(len(fake_ids("the cat")) + len(fake_ids("a dog!")))
    for name in ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"):
        assert 0 <= int(headers[name]) <= 10_000


@pytest.mark.pool
async def test_errors_by_item_leave_null_in_place_and_are_named_in_a_header(http: httpx.AsyncClient) -> None:
    body = {"inputs": ["the cat", "", [2, 99_999], LONG, "a dog"], "truncate": False}
    response = await http.post("/embed", json=body, headers={"x-item-errors": "true"})
    assert response.status_code == 200
    assert [vector is None for vector in response.json()] == [False, True, True, True, False]
    assert response.headers["x-item-errors"] == "3; 1:Empty, 2:Tokenizer, 3:Validation"
    fine = await http.post("/embed", json={"inputs": "the cat"}, headers={"x-item-errors": "true"})
    assert fine.headers["x-item-errors"] == "0"
    assert "x-item-errors" not in (await http.post("/embed", json={"inputs": "the cat"})).headers


async def test_the_header_names_no_more_than_64_failed_items_but_counts_them_all(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed", json={"inputs": [""] * 100}, headers={"x-item-errors": "1"})
    header = response.headers["x-item-errors"]
    assert header.startswith("100; 0:Empty, 1:Empty")
    assert header.endswith("63:Empty, ...")


@pytest.mark.pool
async def test_ndjson_sends_a_line_for_each_input_and_closes_with_the_usage(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed", json={"inputs": ["the cat", "", "a dog"]}, headers={"accept": "application/x-ndjson"})
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *lines, last = [json.loads(line) for line in response.text.splitlines()]
    found = {line["index"]: line for line in lines}
    assert found[1] == {"index": 1, "error": "`inputs` cannot be empty", "error_type": "Empty"}
    np.testing.assert_array_equal(np.array(found[2]["embedding"], np.float32), row(http, contract.EMBEDDING, fake_ids("a dog")))
    assert last["usage"]["total_tokens"] == len(fake_ids("the cat")) + len(fake_ids("a dog"))


# The other vectors -----------------------------------------------------------------------------------------------------------------------


async def test_embed_all_sends_a_vector_for_each_token_not_normalised(http: httpx.AsyncClient) -> None:
    response = await http.post("/embed_all", json={"inputs": ["the cat", "a small bird", [2, 4, 3]]})
    for got, token_ids in zip(response.json(), (fake_ids("the cat"), fake_ids("a small bird"), [2, 4, 3]), strict=True):
        assert np.shape(got) == (len(token_ids), HIDDEN)
        np.testing.assert_array_equal(np.array(got, np.float32), row(http, contract.TOKEN_EMBEDDINGS, token_ids))
    assert response.headers["x-compute-characters"] == str(len("the cat") + len("a small bird") + 3)


async def test_similarity_is_the_cosine_with_each_sentence(http: httpx.AsyncClient) -> None:
    body = {"inputs": {"source_sentence": "the cat", "sentences": ["a dog", "the cat"]}}
    response = await http.post("/similarity", json=body)
    source, dog = (row(http, contract.EMBEDDING, fake_ids(text)).astype(np.float64) for text in ("the cat", "a dog"))
    np.testing.assert_allclose(response.json(), [source @ dog, 1], atol=FLOAT32_TOLERANCE)
    assert max(response.json()) <= 1
    prompted = await http.post("/similarity", json={**body, "parameters": {"prompt_name": "query", "truncate": True}})
    assert prompted.json()[0] != response.json()[0]


# /rerank ---------------------------------------------------------------------------------------------------------------------------------


TEXTS = ["the cat", "a dog", "paris", "berlin", "a red stone"]


async def test_rerank_orders_by_logit_and_scores_by_its_sigmoid(http: httpx.AsyncClient) -> None:
    expected = {index: float(logits(http, "reranker", "the capital", text)[0]) for index, text in enumerate(TEXTS)}
    order = sorted(expected, key=lambda index: -expected[index])
    response = await http.post("/rerank", json={"query": "the capital", "texts": TEXTS})
    assert [rank["index"] for rank in response.json()] == order
    for rank in response.json():
        assert set(rank) == {"index", "score"}
        assert rank["score"] == pytest.approx(1 / (1 + math.exp(-expected[rank["index"]])), abs=SCORE_TOLERANCE)

    raw = await http.post("/rerank", json={"query": "the capital", "texts": TEXTS, "raw_scores": True, "return_text": True})
    assert raw.json() == [{"index": index, "score": expected[index], "text": TEXTS[index]} for index in order]


async def test_rerank_on_an_encoder_goes_by_the_cosine_and_says_so(http: httpx.AsyncClient) -> None:
    body = {"query": "the cat", "texts": ["a dog", "the cat", "a fish"], "model": "encoder", "return_text": True}
    answer = await http.post("/rerank", json=body)
    cohere = (await http.post("/v2/rerank", json={"query": "the cat", "documents": body["texts"], "model": "encoder"})).json()
    assert [(one["index"], one["score"]) for one in answer.json()] == [(one["index"], one["relevance_score"]) for one in cohere["results"]]
    assert {one["index"]: one["text"] for one in answer.json()} == dict(enumerate(body["texts"]))
    assert answer.headers["x-warnings"] == cohere["meta"]["warnings"][0]
    assert (await http.post("/rerank", json={**body, "top_n": 1})).json() == answer.json()[:1]
    raw = (await http.post("/rerank", json={**body, "raw_scores": True})).json()
    assert [(1 + one["score"]) / 2 for one in raw] == [one["score"] for one in answer.json()]
    long = {**body, "texts": ["cat " * 50], "truncate": False}
    assert_error(await http.post("/rerank", json=long), 422, "Validation", "less than")
    assert_error(await http.post("/rerank", json={**body, "texts": ["a", ""]}), 400, "Empty", "`texts` cannot be empty")


async def test_rerank_with_documents_is_jinas(http: httpx.AsyncClient) -> None:
    body = {"query": "the cat", "documents": ["a dog", "the cat"], "model": "reranker", "top_n": 1}
    here, there = [(await http.post(path, json=body)).json() for path in ("/rerank", "/v1/rerank")]
    assert {**here, "id": ""} == {**there, "id": ""}
    for raw, document in ((False, "the cat"), (None, {"text": "the cat"})):  # infinity's clients send `raw_scores`, and expect a string
        infinity = (await http.post("/rerank", json={**body, "documents": ["the cat"], "raw_scores": raw})).json()
        assert infinity["results"][0]["document"] == document
    refused = await http.post("/rerank", json={**body, "model": "nobody"})
    assert (refused.status_code, list(refused.json())) == (404, ["detail", "message"])


async def test_the_form_of_a_rerank_is_told_by_its_fields(http: httpx.AsyncClient) -> None:
    bodies: list[dict[str, Any]] = [
        {"query": "texts", "documents": ["a dog"]},  # the other form's field as a text
        {"query": "a", "documents": ["texts", "a dog"]},
        {"query": "a", "documents": ["a dog"], "texts": None},
        {"query": "a", "documents": ["a dog"], "texts": []},
        {"query": "documents", "texts": ["a dog"]},
        {"query": "a", "documents": None, "texts": ["documents"]},
        {"query": "a", "documents": ["a dog"], "texts": ["a cat"]},
    ]
    for body in bodies:
        answer = await http.post("/rerank", json=body)
        assert answer.status_code == 200, (body, answer.text)
        assert isinstance(answer.json(), list if body.get("texts") else dict), body


async def test_a_model_is_chosen_by_url_or_header(http: httpx.AsyncClient) -> None:
    body = {"query": "a", "texts": ["b"]}
    wanted = (await http.post("/rerank", json={**body, "model": "encoder"})).json()
    assert (await http.post("/rerank", json=body)).json() != wanted  # the reranker is the default
    for path, headers in (("/rerank?model=encoder", {}), ("/models/encoder/rerank", {}), ("/rerank", {"x-model": "encoder"})):
        assert (await http.post(path, json=body, headers=headers)).json() == wanted
    assert (await http.get("/models/classifier/info")).json()["model_id"] == "classifier"
    assert (await http.post("/models/encoder/embed", json={"inputs": "a"})).status_code == 200
    assert_error(await http.post("/models/nobody/embed", json={"inputs": "a"}), 404, "Validation", "nobody")
    assert_error(await http.post("/models/encoder/embed", json={"inputs": "a"}, headers={"x-lane": "fast"}), 422, "Validation", "x-lane")
    vector = await http.post("/models/encoder/v1/embeddings", json={"input": "a", "model": "any word"})
    assert (vector.status_code, vector.json()["model"]) == (200, "encoder")
    assert_error(await http.post("/embed?model=reranker", json={"inputs": "a"}), 424, "Backend", "reranker")


async def test_made_up_names_have_a_default_where_the_settings_name_one(tmp_path: Path) -> None:
    made = bundles(tmp_path)
    async with client(fake_app(*made)) as strict:
        assert (await strict.post("/v1/embeddings", json={"input": "a", "model": "text-embedding-3-small"})).status_code == 404
    async with client(fake_app(*made, default_model=("classifier", "encoder"))) as http:
        answer = await http.post("/v1/embeddings", json={"input": "a", "model": "text-embedding-3-small"})
        assert (answer.status_code, answer.json()["model"]) == (200, "encoder")
        assert (await http.post("/predict", json={"inputs": "a", "model": "made-up"})).status_code == 200
        assert (await http.get("/v1/models/made-up")).status_code == 404
        assert (await http.post("/v1/completions", json={"prompt": "a", "model": "made-up"})).status_code == 404
    broken = fake_app(*made, default_model=("nobody",))
    async with client(broken):
        assert "default_model names model nobody" in str(broken.state.catalog.failure)


async def test_rerank_needs_texts_and_a_model_that_ranks_and_every_one_of_its_scores(http: httpx.AsyncClient) -> None:
    assert_error(await http.post("/rerank", json={"query": "a", "texts": []}), 400, "Empty", "`texts` cannot be empty")
    assert_error(await http.post("/rerank", json={"query": "a", "texts": ["b"], "model": "classifier"}), 424, "Backend")
    assert_error(await http.post("/rerank", json={"texts": ["b"]}), 422, "Validation", "query")
    both_empty = {"query": "", "texts": ["b", ""]}
    assert_error(await http.post("/rerank", json=both_empty, headers={"x-item-errors": "true"}), 400, "Empty")


# /predict --------------------------------------------------------------------------------------------------------------------------------


def softmax(values: np.ndarray) -> np.ndarray:
    return np.exp(values) / np.exp(values).sum()


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def check_predictions(got: Any, scores: np.ndarray, labels: list[str]) -> None:
    order = np.argsort(-scores)
    assert [each["label"] for each in got] == [labels[index] for index in order]
    np.testing.assert_allclose([each["score"] for each in got], scores[order], rtol=0, atol=SCORE_TOLERANCE)


LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"]


async def test_predict_of_one_text_or_one_pair_is_a_flat_list(http: httpx.AsyncClient) -> None:
    for inputs, pair in (("the cat", None), (["the cat"], None), (["the cat", "a dog"], "a dog")):
        response = await http.post("/predict", json={"inputs": inputs})
        check_predictions(response.json(), softmax(logits(http, "classifier", "the cat", pair)), LABELS)


async def test_predict_of_a_batch_is_a_list_of_lists(http: httpx.AsyncClient) -> None:
    response = await http.post("/predict", json={"inputs": [["the cat"], ["the cat", "a dog"], ["paris"]]})
    pairs = [("the cat", None), ("the cat", "a dog"), ("paris", None)]
    for got, pair in zip(response.json(), pairs, strict=True):
        check_predictions(got, softmax(logits(http, "classifier", *pair)), LABELS)
    assert len((await http.post("/predict", json={"inputs": [["the cat"]]})).json()[0]) == len(LABELS)


async def test_raw_scores_are_logits_and_a_model_of_many_labels_scores_each_alone(http: httpx.AsyncClient) -> None:
    raw = await http.post("/predict", json={"inputs": "the cat", "raw_scores": True})
    check_predictions(raw.json(), logits(http, "classifier", "the cat"), LABELS)
    tags = await http.post("/predict", json={"inputs": "the cat", "model": "tags"})
    check_predictions(tags.json(), sigmoid(logits(http, "tags", "the cat")), ["red", "green", "blue"])


async def test_a_reranker_predicts_one_label_by_its_sigmoid(http: httpx.AsyncClient) -> None:
    response = await http.post("/predict", json={"inputs": ["the capital", "paris"], "model": "reranker"})
    check_predictions(response.json(), sigmoid(logits(http, "reranker", "the capital", "paris")), ["LABEL_0"])


async def test_predict_refuses_what_is_neither_text_nor_pair_nor_batch(http: httpx.AsyncClient) -> None:
    for inputs in (["a", "b", "c"], [["a", "b", "c"]], ["a", ["b"]], [["a"], "b"], 5, None, {}):
        assert_error(await http.post("/predict", json={"inputs": inputs}), 422, "Validation", "inputs")
    for inputs in ("", [], [[]], ["", ""], [["a"], [""]]):
        assert_error(await http.post("/predict", json={"inputs": inputs}), 400, "Empty", "cannot be empty")
    for model in ("encoder", "token_classifier"):
        assert_error(await http.post("/predict", json={"inputs": "a", "model": model}), 424, "Backend", model)


# Tokens ----------------------------------------------------------------------------------------------------------------------------------


async def test_tokenize_counts_bytes_also_where_a_character_has_several(http: httpx.AsyncClient) -> None:
    text = "é the 日本cat 🙂!"
    (tokens,) = (await http.post("/tokenize", json={"inputs": text})).json()
    assert [token["id"] for token in tokens] == fake_ids(text)
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens[-1]["special"]
    words = tokens[1:-1]
    assert [token["text"] for token in words] == ["é", "the", "日", "本", "cat", "🙂", "!"]
    for token in words:
        assert not token["special"]
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]


async def test_tokenize_without_specials_with_a_prompt_and_in_a_batch(http: httpx.AsyncClient) -> None:
    body = {"inputs": ["the cat", LONG], "add_special_tokens": False, "prompt_name": "query"}
    first, second = (await http.post("/tokenize", json=body)).json()
    assert [token["text"] for token in first] == ["query", ":", "the", "cat"]
    assert (first[-1]["start"], first[-1]["stop"]) == (len("query: the "), len("query: the cat"))
    assert len(second) == 24  # never cut, though the model reads 16
    assert_error(await http.post("/tokenize", json={"inputs": []}), 400, "Empty", "`inputs` cannot be empty")
    assert_error(await http.post("/tokenize", json={"inputs": ["a", ""]}), 400, "Empty", "`inputs` cannot be empty")


async def test_decode_is_the_way_back(http: httpx.AsyncClient) -> None:
    assert (await http.post("/decode", json={"ids": fake_ids("the cat")})).json() == ["the cat"]
    both = await http.post("/decode", json={"ids": [fake_ids("the cat"), fake_ids("paris")], "skip_special_tokens": False})
    assert both.json() == ["[CLS] the cat [SEP]", "[CLS] paris [SEP]"]
    assert (await http.post("/decode", json={"ids": [2**31 - 1]})).json() == [""]
    for nothing in ([], [[]], [[4], []]):
        assert_error(await http.post("/decode", json={"ids": nothing}), 400, "Empty", "`input_ids` cannot be empty")
    for bad in ([-1], [2**31], ["a"], [1.5], [True]):
        assert_error(await http.post("/decode", json={"ids": bad}), 422, "Validation")


# The service itself ----------------------------------------------------------------------------------------------------------------------


async def test_info_has_the_fields_of_text_embeddings_inference_and_ours(http: httpx.AsyncClient) -> None:
    info = (await http.get("/info")).json()
    catalog = app_of(http).state.catalog
    manifest = catalog.models["encoder"].manifest
    theirs = {
        "model_id": "encoder",
        "model_sha": manifest.source.weights_sha256,
        "model_dtype": "float32",
        "served_model_name": "encoder",
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 524_288 // MAX_TOKENS,
        "max_input_length": MAX_TOKENS,
        "max_batch_tokens": 512,
        "max_batch_requests": None,
        "max_client_batch_size": 2048,
        "auto_truncate": True,
        "tokenization_workers": catalog.budget.tokenizer_threads,
        "sha": None,
        "docker_label": None,
    }
    assert info.items() >= theirs.items()
    ours = {"kind": "encoder", "precision": "fp32", "fingerprint": manifest.fingerprint, "budget": asdict(catalog.budget)}
    assert info.items() >= ours.items()
    assert info["self_test"] == {"n_texts": 3, "min_cosine": pytest.approx(1), "max_abs_error": None}
    assert info["engine"]["max_queue_tokens"] == 524_288
    assert info["models"] == [*MODELS, "tags"]
    assert info["providers"] == dict.fromkeys(info["models"], info["provider"])


async def test_info_of_another_model_says_its_labels(http: httpx.AsyncClient) -> None:
    for kind in ("reranker", "classifier", "token_classifier"):
        info = (await http.get("/info", params={"model": kind})).json()
        labels = info["model_type"][kind]
        assert labels["label2id"] == {label: int(index) for index, label in labels["id2label"].items()}
        assert info["model_id"] == kind
    assert_error(await http.get("/info", params={"model": "nobody"}), 404, "Validation", "nobody")


@pytest.mark.pool
async def test_health_is_200_with_nothing_in_it_and_503_while_the_runtime_fails(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        response = await http.get(path)
        assert (response.status_code, response.content) == (200, b"")
        session(http, "encoder").broken = True
        assert_error(await http.post("/embed", json={"inputs": "a"}), 424, "Backend", "runtime failed")
        assert_error(await http.get(path), 503, "Unhealthy", "unhealthy")
        assert 'err="503"' not in (await http.get("/metrics")).text, "a probe is no refused request"
        session(http, "encoder").broken = False
        assert (await http.get(path)).status_code == 200


# Whatever the model is for ---------------------------------------------------------------------------------------------------------------


async def test_the_root_does_what_the_model_is_for(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"inputs": ["the cat", "a dog"], "dimensions": 4}, "/embed"),
        ({"inputs": "the cat", "parameters": None, "stream": None}, "/embed"),
        ({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "/similarity"),
        ({"model": "reranker", "query": "a", "texts": ["b", "c"], "raw_scores": True}, "/rerank"),
        ({"model": "reranker", "inputs": ["a", "b"]}, "/predict"),
        ({"model": "classifier", "inputs": ["a", "b"]}, "/predict"),
    ]
    for body, route in rows:
        direct = await http.post(route, json=body)
        for path in ("/", "/invocations"):
            there = await http.post(path, json=body)
            assert there.status_code == 200, (body, there.text)
            assert there.json() == direct.json()
            assert there.headers["x-compute-tokens"] == direct.headers["x-compute-tokens"]


async def test_the_root_answers_errors_in_this_dialect(http: httpx.AsyncClient) -> None:
    assert_error(await http.post("/", json={}), 422, "Validation", "inputs")
    assert_error(await http.post("/", content=b"{"), 400, "Validation")
    assert_error(await http.post("/", json={"inputs": "a", "model": "nobody"}), 404, "Validation", "nobody")
    assert_error(await http.post("/", json={"inputs": "a", "model": "token_classifier"}), 424, "Backend")
    labels = {"inputs": "a", "model": "classifier", "parameters": {"candidate_labels": ["b"]}}
    assert_error(await http.post("/", json=labels), 400, "Validation", "`parameters.candidate_labels` is not supported")
    assert (await http.post("/", json={**labels, "parameters": {"function_to_apply": "softmax"}, "model": None})).status_code == 200


# Errors ----------------------------------------------------------------------------------------------------------------------------------


POSTS: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/predict": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/tokenize": {"inputs": "a"},
    "/decode": {"ids": [4]},
}


async def test_what_is_no_json_is_400_and_what_is_no_request_422(http: httpx.AsyncClient) -> None:
    for path, body in POSTS.items():
        for nonsense in (b"", b"{", b'{"inputs": "\xff"}', rb'{"inputs": "\ud800"}', b'{"inputs": NaN}x'):
            assert_error(await http.post(path, content=nonsense), 400, "Validation", "not JSON")
        for odd in (b"[]", b"null", b"5", b"{}", b'{"inputs": 5, "texts": 5, "query": 5, "ids": "a"}'):
            assert_error(await http.post(path, content=odd), 422, "Validation")
        assert_error(await http.post(path, json={**body, "model": "x" * 257}), 422, "Validation", "model")
        assert_error(await http.post(path, json={**body, "model": "nobody\x00"}), 404, "Validation", "nobody")


async def test_too_many_inputs_are_a_validation_error_with_the_text_clients_look_for(tmp_path: Path) -> None:
    models = [fake_bundle(tmp_path / kind, kind) for kind in ("encoder", "reranker", "classifier")]
    bodies: dict[str, dict[str, Any]] = {
        "/embed": {"inputs": ["a"] * 4},
        "/embed_all": {"inputs": ["a"] * 4},
        "/rerank": {"query": "a", "texts": ["b"] * 4},
        "/predict": {"inputs": [["a"]] * 4},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"] * 3}},
        "/tokenize": {"inputs": ["a"] * 4},
        "/decode": {"ids": [[4]] * 4},
    }
    async with client(fake_app(*models, max_client_batch=3)) as http:
        for path, body in bodies.items():
            assert_error(await http.post(path, json=body), 422, "Validation", "batch size 4 > maximum allowed batch size 3")


def test_every_error_has_the_status_and_type_of_this_dialect() -> None:
    for error, status, kind in (
        (ServiceError("x"), 500, "Backend"),
        (RuntimeFailed("x"), 424, "Backend"),
        (RouteNotFound("x"), 404, "Validation"),
        (NeverFits("x"), 413, "Validation"),
        (Overloaded("x", retry_after_s=1), 429, "Overloaded"),
        (DeadlineExceeded("x"), 504, "Overloaded"),
        (NotReady("x"), 503, "Unhealthy"),
    ):
        assert render(error) == (status, {"error": "x", "error_type": kind})


def test_the_hubs_client_sends_its_options_and_shows_our_refusals(tmp_path: Path) -> None:
    with serve_in_thread(fake_app(*bundles(tmp_path))) as url:
        for path in ("", "/embed"):
            with InferenceClient(model=url + path) as inference:
                short = inference.feature_extraction(LONG, truncate=True, truncation_direction="left", prompt_name="query", normalize=False)
                pooled = FakeSession().row(contract.POOLED, fake_ids(" ".join([*["the"] * 13, "dog"])))
                np.testing.assert_array_equal(short, [pooled])
                assert inference.feature_extraction("the cat", dimensions=4).shape == (1, 4)
        with InferenceClient(model=url + "/predict") as inference:
            best = inference.text_classification("the cat", top_k=1, function_to_apply="sigmoid")
            assert [each.label for each in best] == [inference.text_classification("the cat")[0].label]
        with InferenceClient(model=url + "/embed") as inference, pytest.raises(HfHubHTTPError, match="must have less than"):
            inference.feature_extraction(LONG, truncate=False)
