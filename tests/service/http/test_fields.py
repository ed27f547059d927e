"""The rules for fields, over every field of every body: a null is absent, what changes nothing is taken, the rest is refused by name."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from service.dialects import chunks, cohere, contextual, given_vectors, jina, next_plaid, pooling, ranking, scores, search_outputs, tgi
from service.dialects.attention import AttentionRequest
from service.dialects.oip import schemas as oip_schemas
from service.dialects.openai import conversations, images, tokens
from service.dialects.openai import embeddings as openai
from service.dialects.openai.responses import schemas as responses
from service.dialects.states import options
from service.dialects.states import schemas as states
from service.dialects.tei import schemas as tei_schemas
from service.dialects.text import schemas as text
from service.http import fields
from service.http.fields import EMPTY, Body, is_empty
from tests.service.dialects.test_images import painter
from tests.service.fakes import client, fake_app, fake_bundle
from tests.service.generation_fakes import TOOL_TEMPLATE, FakeGenerator, generator_app

SAYS = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}

# Every class that reads a part of a body, and the least that it takes. A class without an entry fails the tests.
LEAST: dict[type[Body], dict[str, Any]] = {
    openai.EmbeddingRequest: {"input": "a"},
    search_outputs.SparseOptions: {},
    chunks.Chunks: {},
    contextual.ContextualRequest: {"inputs": [["a"]]},
    ranking.Weights: {"dense": 1},
    search_outputs.MultiVectorOptions: {},
    AttentionRequest: {"input": "a"},
    text.CompletionRequest: {"prompt": "Say:"},
    text.ChatRequest: {"messages": [SAYS]},
    text.ChatMessage: SAYS,
    text.ContentPart: {"type": "text", "text": "a"},
    text.FunctionCall: {"name": "f", "arguments": "{}"},
    text.ToolCall: CALL,
    text.Tool: {"type": "function", "function": {"name": "f"}},
    text.Function: {"name": "f"},
    text.StructuredOutputs: {},
    text.StreamOptions: {},
    text.JsonSchema: {"name": "n", "schema": {"const": None}},
    text.ResponseFormat: {"type": "text"},
    text.TextFormat: {"type": "text"},
    responses.ResponseRequest: {"input": "Hi"},
    responses.InputPart: {"type": "input_text", "text": "a"},
    responses.InputItem: {"role": "user", "content": "a"},
    responses.CallItem: {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    responses.CallOutputItem: {"type": "function_call_output", "call_id": "c", "output": "o"},
    responses.FunctionTool: {"type": "function", "name": "f"},
    responses.NamedFunction: {"type": "function", "name": "f"},
    text.FunctionName: {"name": "f"},
    text.Allowed: {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    text.AllowedTools: {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    text.NamedTool: {"type": "function", "function": {"name": "f"}},
    responses.AllowedFunctions: {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    responses.TextConfig: {},
    responses.ResponseStreamOptions: {},
    images.ImageRequest: {"prompt": "7"},
    tokens.TokenizeRequest: {"prompt": "a"},
    tokens.DetokenizeRequest: {"tokens": [5]},
    tei_schemas.TeiEmbedAllRequest: {"inputs": "a"},
    tei_schemas.TeiEmbedRequest: {"inputs": "a"},
    tei_schemas.TeiRerankRequest: {"query": "a", "texts": ["b"]},
    tei_schemas.TeiPredictRequest: {"inputs": "a"},
    tei_schemas.PipelineParameters: {},
    tei_schemas.SimilarityInputs: {"source_sentence": "a", "sentences": ["b"]},
    tei_schemas.SimilarityParameters: {},
    tei_schemas.TeiSimilarityRequest: {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    tei_schemas.TeiTokenizeRequest: {"inputs": "a"},
    tei_schemas.TeiDecodeRequest: {"ids": [5]},
    options.StoreState: {},
    states.CreateState: {"prompt": "Hello"},
    responses.ConversationReference: {"id": "conv_1"},
    conversations.CreateConversation: {},
    conversations.ChangeConversation: {"metadata": {"a": "b"}},
    conversations.AddItems: {"items": [SAYS]},
    states.ForkState: {},
    states.RewindState: {},
    states.ChangeState: {},
    tgi.TgiGrammar: {"type": "regex", "value": "a"},
    tgi.TgiParameters: {},
    tgi.TgiRequest: {"inputs": "Say:"},
    cohere.TextBlock: {"type": "text", "text": "a"},
    cohere.MixedInput: {"content": [{"type": "text", "text": "a"}]},
    cohere.EmbedV1Request: {"texts": ["a"]},
    cohere.EmbedRequest: {"input_type": "search_query", "texts": ["a"]},
    given_vectors.Document: {"text": "a"},
    given_vectors.GivenSparse: {"indices": [1], "values": [1.0]},
    given_vectors.GivenMatrix: {"data": [[1.0]]},
    next_plaid.PlaidEncodeRequest: {"texts": ["a"]},
    next_plaid.PlaidDocument: {"embeddings": [[1.0]]},
    next_plaid.PlaidRerankRequest: {"query": [[1.0]], "documents": [{"embeddings": [[1.0]]}]},
    next_plaid.PlaidRerankTextsRequest: {"query": "a", "documents": ["b"]},
    pooling.PoolingRequest: {"input": "a"},
    scores.ScoreRequest: {"text_1": "a", "text_2": ["b"]},
    cohere.CohereRerankRequest: {"query": "a", "documents": ["b"]},
    jina.JinaRerankRequest: {"query": "a", "documents": ["b"]},
    oip_schemas.InferRequest: {"inputs": [TENSOR]},
    oip_schemas.InputTensor: {"name": "text", "datatype": "BYTES", "shape": [1]},
    oip_schemas.WantedOutput: {"name": "pooled"},
    oip_schemas.RequestParameters: {},
    oip_schemas.InputParameters: {},
    oip_schemas.OutputParameters: {},
}
_OF_DECODERS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def ours(body: type[Body]) -> Iterator[type[Body]]:
    """The classes that read bodies, without the bases that only share fields."""
    for each in body.__subclasses__():
        yield each
        yield from ours(each)


BASES = {
    "Fields",
    "DrawingFields",
    "SamplingFields",
    "GenerationRequestBody",
    "TeiRequest",
    "TeiTruncation",
    "Given",
    "RerankRequest",
    "PlaidBody",
    "FunctionType",
    "KeepFields",
    "StateFields",
}


def names(body: type[Body]) -> dict[str, bool]:
    """Every field by the name it has on the wire, and whether it is required."""
    return {field.alias or name: field.is_required() for name, field in body.model_fields.items()}


def test_every_body_has_its_row() -> None:
    assert {each for each in ours(Body) if each.__name__ not in BASES and each.__module__.startswith("service.")} == set(LEAST)


@pytest.mark.parametrize("body", LEAST, ids=lambda body: body.__name__)
def test_a_null_is_an_absent_field_in_every_object(body: type[Body]) -> None:
    least = LEAST[body]
    wanted = body.model_validate_json(json.dumps(least))
    optional = [name for name, required in names(body).items() if not required]
    nulls = dict.fromkeys([*optional, *body.unsupported, *body.ignored, "a_field_of_tomorrow"])
    assert body.model_validate_json(json.dumps({**nulls, **least})) == wanted
    for name, required in names(body).items():
        if required:
            with pytest.raises(ValidationError):
                body.model_validate_json(json.dumps({**least, name: None}))


@pytest.mark.parametrize(
    ("body", "name", "key", "value"),
    [
        (states.CreateState, "metadata", "a", "b"),
        (text.CompletionRequest, "logit_bias", "5", 1.0),
        (text.ChatRequest, "metadata", "a", "b"),
        (responses.ResponseRequest, "metadata", "a", "b"),
    ],
)
def test_a_null_beside_a_key_of_the_clients_own_is_an_absent_one(body: type[Body], name: str, key: str, value: Any) -> None:
    with_null, without = [body.model_validate_json(json.dumps({**LEAST[body], name: {key: value, **more}})) for more in ({"6": None}, {})]
    assert with_null == without


@pytest.mark.parametrize("body", [body for body in LEAST if body.unsupported or body.ignored], ids=lambda body: body.__name__)
def test_values_that_change_nothing_are_accepted_and_others_refused_by_name(body: type[Body]) -> None:
    least = LEAST[body]
    wanted = body.model_validate_json(json.dumps(least))
    assert not set(names(body)) & (set(body.unsupported) | body.ignored), "a field of the schema is also one without a use"
    for name in body.ignored:
        assert body.model_validate_json(json.dumps({**least, name: "something"})) == wanted
    for name, accepted in body.unsupported.items():
        values = [value for value in accepted if value is not EMPTY]
        with_nulls = [{**value, "a": None} for value in values if isinstance(value, dict)]  # as typed clients send them
        empty: list[Any] = [False, 0, "", [], {}, {"a": None, "b": []}]
        for value in [None, *(empty if EMPTY in accepted else ()), *values, *with_nulls]:
            assert body.model_validate_json(json.dumps({**least, name: value})) == wanted, (name, value)
        for value in ["something", *(() if EMPTY in accepted else empty)]:
            with pytest.raises(ValidationError) as refused:
                body.model_validate_json(json.dumps({**least, name: value}))
            (problem,) = refused.value.errors()
            assert (problem["type"], problem["ctx"]["field"]) == (fields.NOT_SUPPORTED, name)


def test_a_refusal_names_the_values_that_are_accepted() -> None:
    assert fields.refusal((EMPTY, "auto", 1)) == "is not supported: leave it out or send 'auto' or 1"
    assert fields.refusal((EMPTY,)) == "is not supported: leave it out"


# Over HTTP -------------------------------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encoders(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder: Path = tmp_path_factory.mktemp("bundles")
    kinds: Any = ("encoder", "reranker", "classifier")
    async with client(fake_app(*(fake_bundle(folder / kind, kind) for kind in kinds))) as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoders() -> AsyncIterator[httpx.AsyncClient]:
    async with client(generator_app(FakeGenerator("wordy", template=TOOL_TEMPLATE), painter())) as http:
        yield http


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        (
            "/v1/chat/completions",
            text.ChatRequest,
            {"top_logprobs": 0, "stop": "", "guided_choice": [], "stream_options": {}, "structured_outputs": {}},
        ),
        (
            "/v1/chat/completions",
            text.ChatRequest,
            {"modalities": [], "tools": [], "reasoning_effort": "none", "verbosity": "high", "priority": 0},
        ),
        (
            "/v1/chat/completions",
            text.ChatRequest,
            {"messages": [{**SAYS, "name": None, "tool_calls": None, "audio": None, "a_field_of_tomorrow": None}]},
        ),
        (
            "/v1/completions",
            text.CompletionRequest,
            {"suffix": "", "guided_regex": "", "guided_grammar": "", "stream_options": {"include_usage": False}},
        ),
        ("/v1/completions", text.CompletionRequest, {"model": ""}),
        (
            "/v1/responses",
            responses.ResponseRequest,
            {"reasoning": {}, "truncation": "auto", "top_logprobs": 0, "include": ["reasoning.encrypted_content"]},
        ),
        (
            "/v1/responses",
            responses.ResponseRequest,
            {"reasoning": {"effort": None, "summary": None}, "text": {"format": None, "verbosity": "low"}},
        ),
        ("/v2/embed", cohere.EmbedRequest, {"images": [], "inputs": [], "embedding_types": []}),
        ("/v2/rerank", cohere.CohereRerankRequest, {"top_n": 0}),
        ("/embed", tei_schemas.TeiEmbedRequest, {"prompt_name": ""}),
        ("/similarity", tei_schemas.TeiSimilarityRequest, {"parameters": {"truncate": None, "truncation_direction": None}}),
        (
            "/v2/models/encoder/infer",
            oip_schemas.InferRequest,
            {"inputs": [{**TENSOR, "parameters": {"binary_data_size": None}}], "outputs": []},
        ),
        ("/v2/models/encoder/infer", oip_schemas.InferRequest, {"parameters": {"sequence_id": 0, "priority": 0, "timeout": None}}),
    ],
)
async def test_neutral_values_of_fields_that_have_a_use(
    path: str, body: type[Body], more: dict[str, Any], encoders: httpx.AsyncClient, decoders: httpx.AsyncClient
) -> None:
    http = decoders if path in _OF_DECODERS else encoders
    answer = await http.post(path, json={**LEAST[body], **more})
    assert answer.status_code == 200, answer.text


@pytest.mark.asyncio(loop_scope="module")
async def test_routes_of_a_state_and_of_a_conversation_keep_the_rules(decoders: httpx.AsyncClient) -> None:
    await decoders.post("/v1/states", json={"prompt": "Hello", "name": "doc"})
    talk = f"/v1/conversations/{(await decoders.post('/v1/conversations')).json()['id']}"
    for method, path, body, least in (
        ("POST", talk, conversations.ChangeConversation, {"metadata": {}}),
        ("POST", f"{talk}/items", conversations.AddItems, {"items": [SAYS]}),
        ("POST", "/v1/states/doc/fork", states.ForkState, {}),
        ("POST", "/v1/states/doc/rewind", states.RewindState, {"tokens": 1}),
        ("PATCH", "/v1/states/doc", states.ChangeState, {}),
    ):
        nulls = dict.fromkeys([*names(body), "a_field_of_tomorrow"])
        assert (await decoders.request(method, path, json={**nulls, **least})).status_code == 200
        refused = await decoders.request(method, path, json={**least, "a_field_of_tomorrow": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "a_field_of_tomorrow")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_nested_field_is_named_with_its_place(encoders: httpx.AsyncClient, decoders: httpx.AsyncClient) -> None:
    refused = await decoders.post("/v1/chat/completions", json={"messages": [{**SAYS, "audio": {"id": "a"}}]})
    assert refused.json()["error"]["param"] == "messages.0.audio"
    tensor = {**TENSOR, "parameters": {"shared_memory_region": "r"}}
    refused = await encoders.post("/v2/models/encoder/infer", json={"inputs": [tensor]})
    assert "`inputs.0.parameters.shared_memory_region` is not supported" in refused.json()["error"]


@pytest.mark.asyncio(loop_scope="module")
async def test_vllms_truncation_of_prompts_is_done(encoders: httpx.AsyncClient) -> None:
    async def vector(**more: Any) -> Any:
        return (await encoders.post("/v1/embeddings", json={"input": "the cat is on the tree", **more})).json()["data"][0]["embedding"]

    assert await vector(truncate_prompt_tokens=4) == await vector(input="the cat")
    assert await vector(truncate_prompt_tokens=4, truncate="left") == await vector(input="the tree")
    assert await vector(truncate_prompt_tokens=-1) == await vector(truncate_prompt_tokens=0) == await vector()


def test_empty_is_what_holds_nothing() -> None:
    assert all(map(is_empty, [None, False, 0, 0.0, "", [], {}, {"a": {"b": None}}]))
    assert not any(map(is_empty, [True, 1, "a", [None], {"a": 1}]))
