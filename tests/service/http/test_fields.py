"""The rules for fields, over every field of every body: a null is absent, what changes nothing is taken, the rest is refused by name."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from service.dialects import cohere, fields_page, generation_schemas, jina, ranking, routers, tgi
from service.dialects.attention import AttentionRequest
from service.dialects.oip import schemas as oip_schemas
from service.dialects.openai import conversations, images, tokens, tool_calls
from service.dialects.openai import embeddings as openai
from service.dialects.openai.chat_schemas import ChatMessage, ChatRequest, ContentPart, FunctionCall, Tool, ToolCall
from service.dialects.openai.completion_schemas import CompletionRequest
from service.dialects.openai.responses import schemas as responses
from service.dialects.states import options
from service.dialects.states import schemas as states
from service.dialects.tei import schemas as tei_schemas
from service.dialects.tei import tokens as tei_tokens
from service.http import fields
from service.http.fields import Body, Other, is_empty
from tests.service.dialects.test_images import painter
from tests.service.fakes import client, fake_app, fake_bundle
from tests.service.generation_fakes import TOOL_TEMPLATE, FakeGenerator, generator_app

SAYS = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}

# Every class that reads a part of a body: the least that it takes, and for each of its other fields a value that is taken. A class or a
# field without an entry here fails the tests: its author decides what a null and an empty value of it mean.
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 1,
    "top_k": 2,
    "min_p": 0.1,
    "typical_p": 0.5,
}
ENDING = {
    **SAMPLING,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "stop": "x",
    "repetition_penalty": 1.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": [5, 6],
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_grammar": 'start: "a"',
    "guided_choice": ["a", "b"],
    "structured_outputs": {"regex": "a"},
}
KEEPING = {"name": "doc", "ttl_s": 60, "pin": True, "metadata": {"a": "b"}}
CONTINUING = {"state": "doc", "store_state": {"name": "doc"}, "exact": "best_effort"}
GENERATING = {
    **ENDING,
    "model": "wordy",
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "prompt_logprobs": 1,
    "durability": "none",
    "user": "u",
    **CONTINUING,
    "cache_salt": "s",
}
TRUNCATION = {"truncate": True, "truncation_direction": "Left"}
RANKING = {"model": "reranker", "top_n": 1, "return_documents": False, "raw_scores": True}
BODIES: dict[type[Body], tuple[dict[str, Any], dict[str, Any]]] = {
    openai.EmbeddingRequest: (
        {"input": "a"},
        {
            "model": "encoder",
            "encoding_format": "base64",
            "dimensions": 4,
            "user": "u",
            "prompt_name": "query",
            "prompt": "query: ",
            "normalize": False,
            "truncate": "left",
            "truncate_prompt_tokens": 3,
        },
    ),
    AttentionRequest: ({"input": "a"}, {"model": "classifier", "layers": [0], "heads": [0], "average_heads": True}),
    CompletionRequest: (
        {"prompt": "Say:"},
        {**GENERATING, "max_tokens": 5, "best_of": 1, "echo": True, "logprobs": 1, "num_beams": 2, "attention": True},
    ),
    ChatRequest: (
        {"messages": [SAYS]},
        {
            **GENERATING,
            "max_completion_tokens": 5,
            "max_tokens": 5,
            "logprobs": True,
            "top_logprobs": 1,
            "response_format": {"type": "text"},
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "store": False,
            "modalities": ["text"],
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
        },
    ),
    ChatMessage: (SAYS, {"name": "n", "refusal": "no", "reasoning_content": "r", "tool_calls": [CALL], "tool_call_id": "1"}),
    ContentPart: ({"type": "text", "text": "a"}, {}),
    FunctionCall: ({"name": "f", "arguments": "{}"}, {}),
    ToolCall: (CALL, {"type": "function"}),
    Tool: ({"type": "function", "function": {"name": "f"}}, {}),
    tool_calls.Function: ({"name": "f"}, {"description": "d", "parameters": {"const": None}, "strict": True}),
    generation_schemas.StructuredOutputs: (
        {},
        {"json": {"type": "object"}, "regex": "a", "grammar": "a", "choice": ["a"], "json_object": True},
    ),
    generation_schemas.StreamOptions: ({}, {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}),
    generation_schemas.JsonSchema: ({"name": "n", "schema": {"const": None}}, {"strict": False, "description": "d"}),
    generation_schemas.ResponseFormat: ({"type": "text"}, {"json_schema": {"name": "n", "schema": {}}, "value": "a"}),
    generation_schemas.TextFormat: ({"type": "text"}, {"name": "n", "schema": {"const": None}, "strict": False, "description": "d"}),
    responses.ResponseRequest: (
        {"input": "Hi"},
        {
            **ENDING,
            **CONTINUING,
            "cache_salt": "s",
            "model": "wordy",
            "instructions": "be brief",
            "max_output_tokens": 5,
            "text": {"verbosity": "low"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "metadata": {"a": "b"},
            "stream": True,
            "stream_options": {},
            "store": False,
            "previous_response_id": "resp_1",
            "conversation": {"id": "conv_1"},
            "background": False,
            "truncation": "auto",
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "service_tier": "auto",
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
        },
    ),
    responses.InputPart: ({"type": "input_text", "text": "a"}, {"annotations": [], "logprobs": [1]}),
    responses.InputItem: ({"role": "user", "content": "a"}, {"type": "message", "id": "i", "status": "completed", "phase": "p"}),
    responses.CallItem: ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"id": "i", "status": "completed"}),
    responses.CallOutputItem: ({"type": "function_call_output", "call_id": "c", "output": "o"}, {"id": "i", "status": "completed"}),
    responses.FunctionTool: ({"type": "function", "name": "f"}, {"description": "d", "parameters": {"const": None}, "strict": True}),
    responses.NamedFunction: ({"type": "function", "name": "f"}, {}),
    tool_calls.FunctionName: ({"name": "f"}, {}),
    tool_calls.Allowed: ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, {}),
    tool_calls.AllowedTools: (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
        {},
    ),
    tool_calls.NamedTool: ({"type": "function", "function": {"name": "f"}}, {}),
    responses.AllowedFunctions: ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, {}),
    responses.TextConfig: ({}, {"format": {"type": "text"}, "verbosity": "low"}),
    responses.ResponseStreamOptions: ({}, {"include_obfuscation": False}),
    images.ImageRequest: (
        {"prompt": "7"},
        {
            **SAMPLING,
            "model": "painter",
            "n": 2,
            "size": "8x6",
            "response_format": "b64_json",
            "output_format": "png",
            "background": "opaque",
            "quality": "auto",
            "stream": True,
            "partial_images": 1,
            "user": "u",
            "safety_identifier": "s",
        },
    ),
    tokens.TokenizeRequest: (
        {"prompt": "a"},
        {"model": "wordy", "messages": [SAYS], "add_special_tokens": False, "add_generation_prompt": False, "return_token_strs": True},
    ),
    tokens.DetokenizeRequest: ({"tokens": [5]}, {"model": "wordy"}),
    tei_schemas.TeiEmbedAllRequest: ({"inputs": "a"}, {**TRUNCATION, "model": "encoder", "prompt_name": "query"}),
    tei_schemas.TeiEmbedRequest: (
        {"inputs": "a"},
        {**TRUNCATION, "model": "encoder", "prompt_name": "query", "normalize": False, "dimensions": 4},
    ),
    tei_schemas.TeiRerankRequest: (
        {"query": "a", "texts": ["b"]},
        {**TRUNCATION, "model": "reranker", "raw_scores": True, "return_text": True, "top_n": 1},
    ),
    tei_schemas.TeiPredictRequest: (
        {"inputs": "a"},
        {**TRUNCATION, "model": "classifier", "raw_scores": True, "parameters": {"top_k": 1}},
    ),
    tei_schemas.PipelineParameters: ({}, {"function_to_apply": "none", "top_k": 1}),
    tei_schemas.SimilarityInputs: ({"source_sentence": "a", "sentences": ["b"]}, {}),
    tei_schemas.SimilarityParameters: ({}, {**TRUNCATION, "prompt_name": "query"}),
    tei_schemas.TeiSimilarityRequest: (
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        {"model": "encoder", "parameters": {"prompt_name": "query"}},
    ),
    tei_schemas.TeiTokenizeRequest: ({"inputs": "a"}, {"model": "encoder", "add_special_tokens": False, "prompt_name": "query"}),
    tei_schemas.TeiDecodeRequest: ({"ids": [5]}, {"model": "encoder", "skip_special_tokens": False}),
    options.StoreState: ({}, {**KEEPING, "name_version": 0}),
    states.CreateState: (
        {"prompt": "Hello"},
        {
            **KEEPING,
            "model": "wordy",
            "token_ids": [5],
            "messages": [SAYS],
            "parent": "doc",
            "exact": "best_effort",
        },
    ),
    responses.ConversationReference: ({"id": "conv_1"}, {}),
    conversations.CreateConversation: ({}, {"items": [SAYS], "metadata": {"a": "b"}}),
    conversations.ChangeConversation: ({"metadata": {"a": "b"}}, {}),
    conversations.AddItems: ({"items": [SAYS]}, {}),
    states.ForkState: ({}, {**KEEPING, "n": 2, "ttl_s": "never"}),
    states.RewindState: ({}, {**KEEPING, "to": 1, "tokens": 1, "to_state": "doc", "exact": "strict"}),
    states.ChangeState: ({}, KEEPING),
    tgi.TgiGrammar: ({"type": "regex", "value": "a"}, {}),
    tgi.TgiParameters: (
        {},
        {
            "do_sample": True,
            "temperature": 0.5,
            "top_k": 1,
            "top_p": 0.5,
            "typical_p": 0.5,
            "seed": 1,
            "max_new_tokens": 5,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            "stop": ["x"],
            "truncate": 1,
            "return_full_text": True,
            "grammar": {"type": "json", "value": {"const": None}},
            "details": True,
            "decoder_input_details": True,
            "top_n_tokens": 1,
        },
    ),
    tgi.TgiRequest: ({"inputs": "Say:"}, {"model": "wordy", "parameters": {"details": True}, "stream": True}),
    cohere.TextBlock: ({"type": "text", "text": "a"}, {}),
    cohere.MixedInput: ({"content": [{"type": "text", "text": "a"}]}, {}),
    cohere.EmbedV1Request: (
        {"texts": ["a"]},
        {"model": "encoder", "input_type": "search_query", "images": ["data:"], "embedding_types": ["int8"], "truncate": "START"},
    ),
    cohere.EmbedRequest: (
        {"input_type": "search_query", "texts": ["a"]},
        {
            "model": "encoder",
            "images": ["data:"],
            "inputs": [{"content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 5,
            "output_dimension": 4,
            "embedding_types": ["int8"],
            "truncate": "START",
            "priority": 1,
        },
    ),
    ranking.DocumentText: ({"text": "a"}, {}),
    cohere.CohereRerankRequest: (
        {"query": "a", "documents": ["b"]},
        {"model": "reranker", "top_n": 1, "max_tokens_per_doc": 5, "priority": 1, "raw_scores": True},
    ),
    jina.JinaRerankRequest: ({"query": "a", "documents": ["b"]}, RANKING),
    oip_schemas.InferRequest: (
        {"inputs": [TENSOR]},
        {"id": "i", "parameters": {"truncate": True}, "outputs": [{"name": "sentence_embedding"}]},
    ),
    oip_schemas.InputTensor: (
        {"name": "text", "datatype": "BYTES", "shape": [1]},
        {"data": ["a"], "parameters": {"binary_data_size": 0}},
    ),
    oip_schemas.WantedOutput: ({"name": "pooled"}, {"parameters": {"binary_data": False}}),
    oip_schemas.RequestParameters: ({}, {"binary_data_output": False, "truncate": "left", "prompt_name": "query"}),
    oip_schemas.InputParameters: ({}, {"binary_data_size": 1}),
    oip_schemas.OutputParameters: ({}, {"binary_data": True}),
}

# Where a body is sent. Parts of bodies are checked without a route.
ROUTES: dict[str, type[Body]] = {
    "/v1/embeddings": openai.EmbeddingRequest,
    "/embeddings": openai.EmbeddingRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": responses.ResponseRequest,
    "/v1/responses/input_tokens": responses.ResponseRequest,
    "/v1/images/generations": images.ImageRequest,
    "/detokenize": tokens.DetokenizeRequest,
    "/embed": tei_schemas.TeiEmbedRequest,
    "/embed_all": tei_schemas.TeiEmbedAllRequest,
    "/rerank": tei_schemas.TeiRerankRequest,
    "/predict": tei_schemas.TeiPredictRequest,
    "/similarity": tei_schemas.TeiSimilarityRequest,
    "/decode": tei_schemas.TeiDecodeRequest,
    "/v1/embed": cohere.EmbedV1Request,
    "/generate": tgi.TgiRequest,
    "/generate_stream": tgi.TgiRequest,
    "/v2/embed": cohere.EmbedRequest,
    "/v2/rerank": cohere.CohereRerankRequest,
    "/v1/rerank": jina.JinaRerankRequest,
    "/v2/models/encoder/infer": oip_schemas.InferRequest,
    "/tokenize": tokens.TokenizeRequest,
    "/v1/states": states.CreateState,
    "/v1/conversations": conversations.CreateConversation,
}
_OF_DECODERS = (
    "/generate",
    "/generate_stream",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/images/generations",
    "/v1/states",
    "/v1/conversations",
    "/detokenize",
    "/tokenize",
)


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
    "FunctionType",
    "KeepFields",
    "StateFields",
}


def names(body: type[Body]) -> dict[str, bool]:
    """Every field by the name it has on the wire, and whether it is required."""
    return {field.alias or name: field.is_required() for name, field in body.model_fields.items()}


def test_every_field_of_every_body_has_its_row() -> None:
    bodies = {each for each in ours(Body) if each.__name__ not in BASES and each.__module__.startswith("service.")}
    assert bodies == set(BODIES)
    for body, (least, rest) in BODIES.items():
        assert set(names(body)) == set(least) | set(rest), body
        assert not set(names(body)) & set(body.others), f"{body}: a field of the schema is in a list of those without a use"


def test_every_route_with_a_body_has_its_row() -> None:
    routes = {
        getattr(route, "path", "")
        for module in (*routers.MODULES, tei_tokens)
        for route in module.router.routes
        if "POST" in getattr(route, "methods", ())
    }
    tested = {path.replace("/encoder/", "/{model:path}/") for path in ROUTES}
    elsewhere = {"/", "/invocations", "/embed_sparse", "/v1/attention"}  # the same bodies, or none that is answered here
    elsewhere |= {"/v1/states/{state}/fork", "/v1/states/{state}/rewind"}  # below, with a state
    elsewhere |= {"/v1/responses/{response_id}/cancel", "/v1/development/kill"}  # without a body
    elsewhere |= {"/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"}  # below, with a conversation
    assert routes == tested | elsewhere


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_null_is_an_absent_field_in_every_object(body: type[Body]) -> None:
    least, rest = BODIES[body]
    wanted = body.model_validate_json(json.dumps(least))
    optional = [name for name, required in names(body).items() if not required]
    nulls = dict.fromkeys([*optional, *body.others, "a_field_of_tomorrow"])
    assert body.model_validate_json(json.dumps({**nulls, **least})) == wanted
    assert set(rest) <= set(optional)
    for name, value in rest.items():
        body.model_validate_json(json.dumps({**least, name: value}))
    for name, required in names(body).items():
        if required:
            with pytest.raises(ValidationError):
                body.model_validate_json(json.dumps({**least, name: None}))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (states.CreateState, "metadata"),
        (CompletionRequest, "logit_bias"),
        (ChatRequest, "logit_bias"),
        (ChatRequest, "metadata"),
        (responses.ResponseRequest, "logit_bias"),
        (responses.ResponseRequest, "metadata"),
    ],
)
def test_a_null_beside_a_key_of_the_clients_own_is_an_absent_one(body: type[Body], name: str) -> None:
    least, rest = BODIES[body]
    with_null, without = [body.model_validate_json(json.dumps({**least, name: {**rest[name], **more}})) for more in ({"6": None}, {})]
    assert with_null == without


@pytest.mark.parametrize(
    ("body", "name"),
    [pytest.param(body, name, id=f"{body.__name__}-{name}") for body in BODIES for name in body.others],
)
def test_what_changes_nothing_is_accepted_and_the_rest_refused(body: type[Body], name: str) -> None:
    least, other = BODIES[body][0], body.others[name]
    wanted = body.model_validate_json(json.dumps(least))
    empty: list[Any] = [None, False, 0, "", [], {}, {"a": None, "b": []}] if other.empty else [None]
    with_nulls = [{**value, "a": None} for value in other.accepts if isinstance(value, dict)]  # as typed clients send them
    for value in [*empty, *other.accepts, *with_nulls]:
        assert body.model_validate_json(json.dumps({**least, name: value})) == wanted
    meaningful = next(value for value in ("something", 7, {"a": "b"}) if value not in other.accepts)
    if other.ignored:
        assert body.model_validate_json(json.dumps({**least, name: meaningful})) == wanted
        return
    with pytest.raises(ValidationError) as refused:
        body.model_validate_json(json.dumps({**least, name: meaningful}))
    (problem,) = refused.value.errors()
    assert problem["type"] == fields.NOT_SUPPORTED
    assert problem["ctx"]["field"] == name


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
@pytest.mark.parametrize("path", ROUTES)
async def test_routes_keep_the_rules(path: str, encoders: httpx.AsyncClient, decoders: httpx.AsyncClient) -> None:
    http = decoders if path in _OF_DECODERS else encoders
    body = ROUTES[path]
    least = {"model": "wordy", **BODIES[body][0]} if path == "/tokenize" else BODIES[body][0]

    async def post(**more: Any) -> httpx.Response:
        return await http.post(path, json={**least, **more})

    for name, required in names(body).items():
        answer = await post(**{name: None})
        if required:
            assert answer.status_code in (400, 422), (path, name, answer.text)
            assert f"`{name}`: Field required: null is the same as leaving it out" in answer.text
        elif not (name == "prompt" or name == "texts"):  # one of several fields that are needed
            assert answer.status_code == 200, (path, name, answer.text)
    for name, other in body.others.items():
        for value in ([[], None] if other.empty else [None]) + list(other.accepts):
            answer = await post(**{name: value})
            assert answer.status_code == 200, (path, name, value, answer.text)
        answer = await post(**{name: "something"})
        assert answer.status_code == (200 if other.ignored else answer.status_code)
        if not other.ignored:
            assert answer.status_code in (400, 422)
            assert f"`{name}` is not supported: {other.because}" in answer.json().get("error", answer.json()).__str__()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"top_logprobs": 0, "stop": "", "guided_choice": [], "stream_options": {}, "structured_outputs": {}}),
        ("/v1/chat/completions", {"modalities": [], "tools": [], "reasoning_effort": "none", "verbosity": "high", "priority": 0}),
        ("/v1/chat/completions", {"messages": [{**SAYS, "name": None, "tool_calls": None, "audio": None, "a_field_of_tomorrow": None}]}),
        ("/v1/completions", {"suffix": "", "guided_regex": "", "guided_grammar": "", "stream_options": {"include_usage": False}}),
        ("/v1/completions", {"model": ""}),
        ("/v1/responses", {"reasoning": {}, "truncation": "auto", "top_logprobs": 0, "include": ["reasoning.encrypted_content"]}),
        ("/v1/responses", {"reasoning": {"effort": None, "summary": None}, "text": {"format": None, "verbosity": "low"}}),
        ("/v2/embed", {"images": [], "inputs": [], "embedding_types": []}),
        ("/v2/rerank", {"top_n": 0}),
        ("/embed", {"prompt_name": ""}),
        ("/similarity", {"parameters": {"truncate": None, "truncation_direction": None}}),
        ("/v2/models/encoder/infer", {"inputs": [{**TENSOR, "parameters": {"binary_data_size": None}}], "outputs": []}),
        ("/v2/models/encoder/infer", {"parameters": {"sequence_id": 0, "priority": 0, "timeout": None}}),
    ],
)
async def test_neutral_values_of_fields_that_have_a_use(
    path: str, more: dict[str, Any], encoders: httpx.AsyncClient, decoders: httpx.AsyncClient
) -> None:
    http = decoders if path in _OF_DECODERS else encoders
    answer = await http.post(path, json={**BODIES[ROUTES[path]][0], **more})
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
    assert not Other("x", accepts=(1,)).takes(True)


def test_the_page_in_docs_says_what_the_lists_say() -> None:
    assert (Path(__file__).parents[3] / "docs" / "fields.md").read_text(encoding="utf-8") == fields_page.page()
