"""The Open Inference Protocol: metadata, readiness, tensors as JSON and as bytes."""

import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import pytest_asyncio
from fastapi import FastAPI

from export import contract
from service.call import JSON_LENGTH_HEADER
from service.dialects.oip.schemas import InferResponse
from tests.service.fakes import HIDDEN, WIDTH, FakeSession, client, fake_app, fake_bundle, fake_ids, serve_in_thread
from tests.service.generation_fakes import FakeGenerator, generator_app

LENGTH = JSON_LENGTH_HEADER


def row(output: str, tokens: list[int], **session: Any) -> list[Any]:
    numbers: list[Any] = FakeSession(**session).row(output, tokens).tolist()
    return numbers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, where: str) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("oip")
    made = fake_app(
        fake_bundle(folder / "enc"),
        fake_bundle(folder / "named", name="org/team.model"),
        fake_bundle(folder / "ranker", "reranker"),
        fake_bundle(folder / "untyped", "reranker", typed=False),
        fake_bundle(folder / "labels", "classifier"),
        fake_bundle(folder / "tags", "token_classifier"),
        aliases={"short": "org/team.model"},
        max_client_batch=8,
        cache_bytes=0,
    )
    async with client(made) as running:
        yield running


def texts(*values: Any, name: str = "text", **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values, **fields}


def numbers(name: str, data: Any, shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": shape, "data": data, **fields}


def batch(*rows: list[int]) -> list[dict[str, Any]]:
    """Rows of ids, padded, with their mask."""
    longest = max(map(len, rows))
    shape = [len(rows), longest]
    return [
        numbers("input_ids", [each + [0] * (longest - len(each)) for each in rows], shape),
        numbers("attention_mask", [[1] * len(each) + [0] * (longest - len(each)) for each in rows], shape),
    ]


VECTORS = [{"name": "sentence_embedding"}]


async def infer(http: httpx.AsyncClient, *inputs: dict[str, Any], model: str = "enc", **fields: Any) -> httpx.Response:
    return await http.post(f"/v2/models/{model}/infer", json={"inputs": inputs, **fields})


def array(output: dict[str, Any]) -> np.ndarray:
    return np.array(output["data"], np.float32).reshape(output["shape"])


# Server and models -----------------------------------------------------------------------------------------------------------------------


async def test_the_server_says_what_it_is(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v2")).json() == {
        "name": "attnserve",
        "version": "0.1.0",
        "extensions": ["binary_tensor_data", "model_configuration"],
    }
    assert (await http.get("/v2/health/live")).json() == {"live": True}
    assert (await http.get("/v2/health/ready")).json() == {"ready": True}


@pytest.mark.pool
async def test_a_model_whose_runs_fail_is_not_ready_and_recovers(http: httpx.AsyncClient, app: FastAPI) -> None:
    session = app.state.catalog.session("enc")
    assert (await http.get("/v2/models/enc/ready")).json() == {"name": "enc", "ready": True}
    session.broken = True
    assert (await infer(http, texts("the cat"))).status_code == 500
    response = await http.get("/v2/models/enc/versions/1/ready")
    assert (response.status_code, response.json()) == (503, {"name": "enc", "ready": False})
    session.broken = False
    assert (await http.get("/v2/models/enc/ready")).status_code == 200


TEXT = {"name": "text", "datatype": "BYTES", "shape": [-1]}
PAIR = {"name": "text_pair", "datatype": "BYTES", "shape": [-1]}
IDS = [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("input_ids", "attention_mask")]


@pytest.mark.pool
async def test_metadata_lists_what_can_be_sent_and_asked(http: httpx.AsyncClient) -> None:
    rows: list[tuple[str, list[dict[str, Any]], dict[str, list[int]]]] = [
        ("enc", [TEXT, *IDS], {"sentence_embedding": [-1, WIDTH], "pooled": [-1, WIDTH], "token_embeddings": [-1, -1, HIDDEN]}),
        ("ranker", [TEXT, PAIR], {"logits": [-1, 1]}),
        ("untyped", [TEXT, PAIR, *IDS], {"logits": [-1, 1]}),
        ("labels", [TEXT, PAIR], {"logits": [-1, 3]}),
        ("tags", [TEXT, *IDS], {"logits": [-1, -1, 3]}),
    ]
    for model, inputs, outputs in rows:
        assert (await http.get(f"/v2/models/{model}")).json() == {
            "name": model,
            "versions": ["1"],
            "platform": "onnx_onnxv1",
            "inputs": inputs,
            "outputs": [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in outputs.items()],
        }


def generators() -> list[FakeGenerator]:
    """A decoder and an encoder-decoder, with a graph."""
    graph = contract.Graph(
        file=contract.GRAPH,
        opset=20,
        inputs=(
            contract.Tensor(name=contract.TOKENS, dtype="int64", shape=("B", "N")),
            contract.Tensor(name="state_0_S", dtype="float32", shape=("B", 2, 4)),
        ),
        outputs=(contract.Tensor(name=contract.STEP_LOGITS, dtype="float32", shape=("B", "M", 258)),),
        operators={},
        optimisation="none",
    )
    models = [FakeGenerator("wordy"), FakeGenerator("writer", kind="encoder_decoder")]
    for model in models:
        model.manifest = model.manifest.model_copy(update={"graph": graph})
    return models


@pytest.mark.pool
@pytest.mark.parametrize("model", ["wordy", "writer"])
async def test_what_continues_texts_has_metadata_and_readiness_and_is_asked_elsewhere(model: str) -> None:
    async with client(generator_app(*generators())) as http:
        body = (await http.get(f"/v2/models/{model}")).json()
        assert body["inputs"] == [
            {"name": "tokens", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "state_0_S", "datatype": "FP32", "shape": [-1, 2, 4]},
        ]
        assert body["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1, 258]}]
        for path in (f"/v2/models/{model}/ready", f"/v2/models/{model}/versions/1/ready"):
            assert (await http.get(path)).json() == {"name": model, "ready": True}
        response = await infer(http, texts("a"), model=model)
        assert response.status_code == 400
        assert "POST /v1/completions" in response.json()["error"]


async def test_what_is_not_there_is_a_404(http: httpx.AsyncClient) -> None:
    for path, said in {
        "/v2/models/nobody": "nobody",
        "/v2/models/nobody/ready": "nobody",
        "/v2/models/nobody/config": "nobody",
        "/v2/models/enc/versions/2": "no version '2'",
        "/v2/models/": "there is no /v2/models",
        "/v2/nothing": "/v2/nothing",
        "/v2/models/enc/stats": "GET /metrics",
        "/v2/models/enc/versions/1/stats": "GET /metrics",
        "/v2/models/stats": "GET /metrics",
    }.items():
        response = await http.get(path)
        assert (response.status_code, list(response.json())) == (404, ["error"])
        assert said in response.json()["error"], path


# Inference in JSON -----------------------------------------------------------------------------------------------------------------------


async def test_text_in_and_its_vectors_out(http: httpx.AsyncClient) -> None:
    response = await infer(http, texts("the cat", "a dog"), id="42")
    assert response.status_code == 200
    body = response.json()
    InferResponse.model_validate(body)
    vectors = body.pop("outputs")[0]
    assert body == {"model_name": "enc", "model_version": "1", "id": "42"}
    assert (vectors["name"], vectors["datatype"], vectors["shape"]) == ("sentence_embedding", "FP32", [2, WIDTH])
    assert array(vectors).tolist() == [row("sentence_embedding", fake_ids("the cat")), row("sentence_embedding", fake_ids("a dog"))]
    assert response.headers["x-truncated-inputs"] == "0"


async def test_all_outputs_are_sent_where_none_is_asked_for(http: httpx.AsyncClient) -> None:
    names = ["sentence_embedding", "pooled", "token_embeddings"]
    for fields in ({}, {"outputs": None}, {"outputs": []}):
        body = (await infer(http, texts("the cat"), **fields)).json()
        assert [output["name"] for output in body["outputs"]] == names
        assert [array(output)[0].tolist() for output in body["outputs"]] == [row(name, fake_ids("the cat")) for name in names]
        body = (await infer(http, texts("the cat"), model="labels", **fields)).json()
        assert [output["name"] for output in body["outputs"]] == ["logits"]


async def test_text_may_be_a_column(http: httpx.AsyncClient) -> None:
    flat = (await infer(http, texts("the cat", "a dog"))).json()
    column = (await infer(http, texts(["the cat"], ["a dog"], shape=[2, 1]))).json()
    assert column == flat


async def test_token_vectors_are_padded_with_zeros_to_the_longest_row(http: httpx.AsyncClient) -> None:
    short, long = fake_ids("the cat"), fake_ids("one two three four")
    body = (await infer(http, texts("the cat", "one two three four"), outputs=[{"name": "token_embeddings"}])).json()
    vectors = array(body["outputs"][0])
    assert vectors.shape == (2, len(long), HIDDEN)
    assert vectors[0, : len(short)].tolist() == row("token_embeddings", short)
    assert not vectors[0, len(short) :].any()
    assert vectors[1].tolist() == row("token_embeddings", long)


async def test_pairs_reach_a_reranker(http: httpx.AsyncClient) -> None:
    body = (await infer(http, texts("the cat", "one"), texts("a dog", "two", name="text_pair"), model="ranker")).json()
    assert array(body["outputs"][0]).tolist() == [row("logits", fake_ids("the cat", "a dog")), row("logits", fake_ids("one", "two"))]


@pytest.mark.parametrize("flat", [False, True])
async def test_ids_run_as_they_are_up_to_the_end_of_their_mask(http: httpx.AsyncClient, app: FastAPI, flat: bool) -> None:
    short, long = fake_ids("the cat"), fake_ids("one two three four")
    tensors = batch(short, long)
    if flat:
        tensors = [{**tensor, "data": [number for each in tensor["data"] for number in each]} for tensor in tensors]
    body = (await infer(http, *tensors, outputs=VECTORS)).json()
    assert array(body["outputs"][0]).tolist() == [row("sentence_embedding", short), row("sentence_embedding", long)]
    assert sorted(each for run in app.state.catalog.session("enc").batches for each in run) == sorted([short, long])


async def test_a_cut_is_reported_or_refused(http: httpx.AsyncClient) -> None:
    response = await infer(http, texts("the cat", "dog " * 100))
    assert response.headers["x-truncated-inputs"] == "1; 1:102>64"
    response = await infer(http, texts("dog " * 100), parameters={"truncate": False})
    assert response.status_code == 400
    assert "tokens" in response.json()["error"]


# Inference in bytes ----------------------------------------------------------------------------------------------------------------------


def packed(*values: str) -> bytes:
    return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)


async def infer_binary(
    http: httpx.AsyncClient, *inputs: tuple[dict[str, Any], bytes], model: str = "enc", length: str | None = None, **fields: Any
) -> httpx.Response:
    tensors = [{**tensor, "parameters": {"binary_data_size": len(blob)}} for tensor, blob in inputs]
    head = orjson.dumps({"inputs": tensors, **fields})
    body = head + b"".join(blob for _, blob in inputs)
    return await http.post(f"/v2/models/{model}/infer", content=body, headers={LENGTH: length or str(len(head))})


def unpack(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    assert response.headers["content-type"] == "application/octet-stream"
    at = int(response.headers[LENGTH])
    return orjson.loads(response.content[:at]), response.content[at:]


def header(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


async def test_text_as_bytes_and_vectors_as_bytes(http: httpx.AsyncClient) -> None:
    blob = packed("the cat", "日本", "a dog")
    response = await infer_binary(
        http, (header("text", "BYTES", 3), blob), parameters={"binary_data_output": True}, id="b", outputs=VECTORS
    )
    body, tail = unpack(response)
    assert body == {
        "model_name": "enc",
        "model_version": "1",
        "id": "b",
        "outputs": [
            {
                "name": "sentence_embedding",
                "datatype": "FP32",
                "shape": [3, WIDTH],
                "parameters": {"binary_data_size": 3 * WIDTH * 4},
            }
        ],
    }
    wanted = [row("sentence_embedding", fake_ids(text)) for text in ("the cat", "日本", "a dog")]
    assert np.frombuffer(tail, "<f4").reshape(3, WIDTH).tolist() == wanted
    assert response.headers["x-truncated-inputs"] == "0"


async def test_ids_as_bytes_stand_in_the_order_of_the_inputs(http: httpx.AsyncClient) -> None:
    tokens, mask = np.array([fake_ids("the cat"), [2, 5, 3, 0]], "<i8"), np.array([[1, 1, 1, 1], [1, 1, 1, 0]], "<i8")
    response = await infer_binary(
        http, (header("attention_mask", "INT64", 2, 4), mask.tobytes()), (header("input_ids", "INT64", 2, 4), tokens.tobytes())
    )
    assert response.headers["content-type"] == "application/json"
    assert array(response.json()["outputs"][0]).tolist() == [
        row("sentence_embedding", fake_ids("the cat")),
        row("sentence_embedding", [2, 5, 3]),
    ]


async def test_json_and_bytes_can_be_mixed_on_both_sides(http: httpx.AsyncClient) -> None:
    tokens = fake_ids("the cat")
    head = orjson.dumps(
        {
            "inputs": [
                {**header("input_ids", "INT64", 1, 4), "parameters": {"binary_data_size": 32}},
                numbers("attention_mask", [1, 1, 1, 1], [1, 4]),
            ],
            "parameters": {"binary_data_output": True},
            "outputs": [
                {"name": "pooled"},
                {"name": "sentence_embedding", "parameters": {"binary_data": False}},
                {"name": "token_embeddings", "parameters": {"binary_data": True}},
            ],
        }
    )
    response = await http.post(
        "/v2/models/enc/infer", content=head + np.array(tokens, "<i8").tobytes(), headers={LENGTH.title(): str(len(head))}
    )
    body, tail = unpack(response)
    assert [set(output) - {"name", "datatype", "shape"} for output in body["outputs"]] == [{"parameters"}, {"data"}, {"parameters"}]
    assert np.frombuffer(tail[: WIDTH * 4], "<f4").tolist() == row("pooled", tokens)
    assert np.frombuffer(tail[WIDTH * 4 :], "<f4").reshape(4, HIDDEN).tolist() == row("token_embeddings", tokens)
    assert array(body["outputs"][1]).tolist() == [row("sentence_embedding", tokens)]


async def test_bytes_that_do_not_fit_are_refused(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], bytes, str | None, str]] = [
        (header("text", "BYTES", 1), packed("a")[:-1], None, "middle of an element"),
        (header("text", "BYTES", 1), b"\xff\xff\xff\xff", None, "middle of an element"),
        (header("text", "BYTES", 1), struct.pack("<I", 2) + b"\xff\xfe", None, "UTF-8"),
        (header("text", "BYTES", 3), packed("a", "b"), None, "3 elements"),
        (header("text", "BYTES", 1), packed("a"), "7", "not JSON"),
        (header("text", "BYTES", 1), packed("a"), "1000000", "not a number of bytes"),
        (header("text", "BYTES", 1), packed("a"), "9" * 5000, "not a number of bytes"),
        (header("input_ids", "INT64", 1, 1), b"\0" * 8, None, "takes text or"),
    ]
    for tensor, blob, length, said in rows:
        response = await infer_binary(http, (tensor, blob), length=length)
        assert (response.status_code, said in response.json()["error"]) == (400, True), (tensor, blob, length)


async def test_bytes_that_nobody_claims_or_that_are_missing_are_refused(http: httpx.AsyncClient) -> None:
    head = orjson.dumps({"inputs": [{**header("text", "BYTES", 1), "parameters": {"binary_data_size": 5}}]})
    for tail in (b"", packed("a") + b"!"):
        response = await http.post("/v2/models/enc/infer", content=head + tail, headers={LENGTH: str(len(head))})
        assert response.status_code == 400
        assert "claim 5 bytes" in response.json()["error"]
    mask = {**header("attention_mask", "INT64", 1, 1), "parameters": {"binary_data_size": 7}}
    head = orjson.dumps({"inputs": [numbers("input_ids", [5], [1, 1]), mask]})
    response = await http.post("/v2/models/enc/infer", content=head + b"\1" * 7, headers={LENGTH: str(len(head))})
    assert "no number of INT64" in response.json()["error"]


# Refusals --------------------------------------------------------------------------------------------------------------------------------

ONES = numbers("attention_mask", [1, 1], [1, 2])


async def test_tensors_that_mean_nothing_are_refused(http: httpx.AsyncClient) -> None:
    rows: list[tuple[list[dict[str, Any]], str]] = [
        ([], "inputs"),
        ([texts()], "empty"),
        ([texts("a", "")], "empty"),
        ([texts(*["a"] * 9)], "batch size 9"),
        ([texts(1)], "other than strings"),
        ([texts("a", shape=[2])], "2 elements"),
        ([texts("a", shape=[1, 1, 1])], "[n] or [n, 1]"),
        ([texts("a", shape=[10**30])], "shape"),
        ([texts("a", datatype="FP32")], "BYTES"),
        ([texts(["a", "b"], shape=[1])], "nesting"),
        ([texts("a", data=None)], "data"),
        ([texts("a"), texts("b")], "takes"),
        ([texts("a", name="prompt")], "takes text or input_ids with attention_mask. Given: prompt"),
        ([numbers("input_ids", [5, 6], [1, 2])], "takes"),
        ([numbers("input_ids", [5, 6], [2]), ONES], "[rows, tokens]"),
        ([numbers("input_ids", [5, 6], [2, 1]), ONES], "must agree"),
        ([numbers("input_ids", [5, 6, 7], [1, 2]), ONES], "2 elements"),
        ([numbers("input_ids", [5, 6.5], [1, 2]), ONES], "INT64 numbers"),
        ([numbers("input_ids", [5, True], [1, 2]), ONES], "INT64 numbers"),
        ([numbers("input_ids", [5, 2**63], [1, 2]), ONES], "INT64 numbers"),
        ([numbers("input_ids", [5, 10**6], [1, 2]), ONES], "vocabulary"),
        ([numbers("input_ids", [5, 6], [1, 2], datatype="INT32"), ONES], "INT64"),
        ([numbers("input_ids", [5, 6], [1, 2]), numbers("attention_mask", [0, 1], [1, 2])], "ones followed by zeros"),
        ([numbers("input_ids", [5, 6], [1, 2]), numbers("attention_mask", [0, 0], [1, 2])], "at least one token"),
        *(
            ([numbers("input_ids", [], shape), numbers("attention_mask", [], shape)], "both at least 1")
            for shape in ([1, 0], [0, 2], [2**31 - 1, 0], [0, 2**31 - 1])  # the last two would be gigabytes of lengths
        ),
    ]
    for inputs, said in rows:
        response = await infer(http, *inputs)
        assert (response.status_code, list(response.json())) == (400, ["error"]), inputs
        assert said in response.json()["error"], inputs


async def test_a_model_is_asked_in_its_own_ways_only(http: httpx.AsyncClient) -> None:
    rows: list[tuple[str, list[dict[str, Any]], str]] = [
        ("ranker", [texts("a")], "takes text with text_pair."),
        ("ranker", batch([2, 5, 3]), "takes text with text_pair."),
        ("ranker", [texts("a"), texts("b", "c", name="text_pair")], "1 rows and `text_pair` 2"),
        ("labels", batch([2, 5, 3]), "takes text or text with text_pair."),
    ]
    for model, inputs, said in rows:
        response = await infer(http, *inputs, model=model)
        assert (response.status_code, said in response.json()["error"]) == (400, True), (model, inputs)


async def test_the_rest_of_a_request_is_checked_too(http: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"outputs": [{"name": "logits"}]}, "no output 'logits'; it has: sentence_embedding, pooled, token_embeddings"),
        ({"outputs": [{"name": "pooled"}, {"name": "pooled"}]}, "twice"),
        ({"outputs": {"name": "pooled"}}, "outputs"),
        ({"id": 7}, "id"),
        ({"parameters": {"prompt_name": "poem"}}, "poem"),
        ({"parameters": {"truncate": "perhaps"}}, "truncate"),
    ]
    for fields, said in rows:
        response = await infer(http, texts("a"), **fields)
        assert (response.status_code, said in response.json()["error"]) == (400, True), fields


async def test_an_output_that_padding_would_blow_up_is_a_413(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.dialects.oip.routes.NUMBER_BYTES", 64 * 1024 * 1024 // (3 * 10 * HIDDEN))
    request = {"outputs": [{"name": "token_embeddings"}]}
    assert (await infer(http, texts("a", "b", "one two three four five six seven eight"), **request)).status_code == 200
    response = await infer(http, texts("a", "b", "c", "one two three four five six seven eight"), **request)
    assert response.status_code == 413
    assert "(40 padded tokens of" in response.json()["error"]


# The whole way ---------------------------------------------------------------------------------------------------------------------------


def test_a_real_server_keeps_slashes_and_bytes_intact(tmp_path: Path) -> None:
    blob = packed("the cat")
    head = orjson.dumps({"inputs": [{**header("text", "BYTES", 1), "parameters": {"binary_data_size": len(blob)}}]})
    with serve_in_thread(fake_app(fake_bundle(tmp_path / "named", name="org/team.model"))) as url, httpx.Client(base_url=url) as http:
        for name in ("org/team.model", "org%2Fteam.model"):
            response = http.post(f"/v2/models/{name}/versions/1/infer", content=head + blob, headers={LENGTH: str(len(head))})
            assert array(response.json()["outputs"][0]).tolist() == [row("sentence_embedding", fake_ids("the cat"))]


async def test_the_configuration_is_that_of_the_tensors(http: httpx.AsyncClient) -> None:
    config = (await http.get("/v2/models/enc/config")).json()
    assert (config["name"], config["backend"]) == ("enc", "onnxruntime")
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "format": "FORMAT_NONE"}
    metadata = (await http.get("/v2/models/enc")).json()
    assert [tensor["name"] for tensor in config["output"]] == [tensor["name"] for tensor in metadata["outputs"]]
    assert (await http.get("/v2/models/enc/versions/1/config")).json() == config
