"""`/v1/chat/completions`, whole and streamed: by hand, and by OpenAI's own client."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from huggingface_hub import InferenceClient
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from service.errors import InvalidRequest, NeverFits
from service.generation.request import Grammar
from tests.service.dialects.asking import HI_PROMPT, N_HI_PROMPT, N_SAID, Route, expect_refusals, route
from tests.service.fakes import PATIENCE_S, client, serve_in_thread
from tests.service.generation_fakes import SAID, TOOL_TEMPLATE, FakeGenerator, generator_app

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[Route]:
    others = FakeGenerator("mute", template=None), FakeGenerator("handy", template=TOOL_TEMPLATE), FakeGenerator("mini", kind="encoder")
    path, body = "/v1/chat/completions", {"messages": HI}
    async with route(path, body, FakeGenerator("wordy"), *others, default_max_tokens=64) as made:
        yield made


# Answers ---------------------------------------------------------------------------------------------------------------------------------


async def test_the_answer_has_openais_form(service: Route) -> None:
    content = await service.whole()
    assert list(content) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert content["id"].startswith("chatcmpl-")
    assert (content["object"], content["model"]) == ("chat.completion", "wordy")
    message = {"role": "assistant", "content": SAID, "refusal": None, "annotations": []}
    assert content["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert content["usage"] == {"prompt_tokens": N_HI_PROMPT, "completion_tokens": N_SAID, "total_tokens": N_HI_PROMPT + N_SAID, **details}


async def test_messages_become_a_prompt_by_the_template_which_writes_the_special_tokens(service: Route) -> None:
    rows: list[tuple[list[dict[str, Any]], str]] = [
        (HI, HI_PROMPT),
        ([{"role": "system", "content": "S"}, *HI], "<s><system>S\n<user>Hi\n<assistant>"),
        ([{"role": "developer", "content": "D"}, *HI], "<s><system>D\n<user>Hi\n<assistant>"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]}], "<s><user>a\né\n<assistant>"),
        ([*HI, {"role": "assistant", "content": "Yes?"}, *HI], "<s><user>Hi\n<assistant>Yes?\n<user>Hi\n<assistant>"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}], "<s><user>a\n<assistant>"),
        ([{"role": "user", "content": ""}], "<s><user>\n<assistant>"),
        ([{"role": "user", "name": "Ann", "content": "{{ 7 * 7 }}"}], "<s><user>{{ 7 * 7 }}\n<assistant>"),
        ([{"role": "tool", "tool_call_id": "1", "content": "42"}], "<s><tool>42\n<assistant>"),
        ([{"role": "user", "content": "é" * 10_000}], f"<s><user>{'é' * 10_000}\n<assistant>"),
    ]
    for messages, prompt in rows:
        assert await service.prompt(messages=messages, max_tokens=1) == prompt


async def test_models_whose_template_writes_who_speaks_are_listed_as_chat_models() -> None:
    plain = FakeGenerator("plain", template="{% for message in messages %}{{ message.content }}{% endfor %}")
    async with client(generator_app(FakeGenerator("wordy"), plain, FakeGenerator("mute", template=None))) as http:
        listed = (await http.get("/v1/models")).json()["data"]
    assert {model["id"]: model["chat"] for model in listed} == {"wordy": True, "plain": False, "mute": False}


async def test_tools_are_shown_to_a_template_that_has_a_place_for_them(service: Route) -> None:
    handy = service.http
    body = {"model": "handy", "messages": HI, "tools": [TOOL]}
    assert (await handy.post("/v1/chat/completions", json=body)).status_code == 200
    assert (await handy.post("/v1/chat/completions", json={**body, "tool_choice": "none"})).status_code == 200
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    several = {**body, "tools": [OTHER, TOOL], "tool_choice": allowed}
    assert (await handy.post("/v1/chat/completions", json=several)).status_code == 200
    model = service.app.state.generators["handy"]
    shown, hidden, some = [model.decode(request.prompt) for request in model.engine.requests]
    assert shown.startswith('[{"type": "function", "function": {"name": "add"')
    assert hidden == HI_PROMPT
    assert some == shown, "the one that is allowed"


CALLED = '{"a": 1, "b": "}\\""}'
NAMED = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([TOOL], "required", CALLED),
        ([TOOL, OTHER], NAMED, CALLED),
        ([OTHER, TOOL], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, CALLED),
        ([OTHER, TOOL], "required", f'{{ "name":"add" , "arguments": {CALLED}}}'),
    ],
)
async def test_a_call_that_is_demanded_comes_back_as_one(service: Route, tools: list[Any], choice: Any, said: str) -> None:
    service.engine.script = said
    whole = await service.whole(messages=HI, tools=tools, tool_choice=choice, n=2, logprobs=True)
    for choice_ in whole["choices"]:
        assert choice_["finish_reason"] == "tool_calls"
        assert choice_["message"]["content"] is None
        (call,) = choice_["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": CALLED})
        assert len(choice_["logprobs"]["content"]) == len(said)
    assert len({choice_["message"]["tool_calls"][0]["id"] for choice_ in whole["choices"]}) == 2
    *events, done = await service.streamed(messages=HI, tools=tools, tool_choice=choice)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "add")
    assert all(set(other) == {"index", "function"} and set(other["function"]) == {"arguments"} for other in others)
    assert first["function"]["arguments"] + "".join(other["function"]["arguments"] for other in others) == CALLED
    assert not any(delta.get("content") for delta in deltas)
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": HI}), ("completions", {"prompt": "a"}), ("responses", {"input": "Hi"})]
)
async def test_events_are_padded_to_multiples_of_64_bytes_on_demand(service: Route, path: str, body: dict[str, Any]) -> None:
    for asked in (True, False):
        options = {"stream": True, "stream_options": {"include_obfuscation": asked}}
        lines = (await service.http.post(f"/v1/{path}", json={**body, **options})).text.splitlines()
        padded = [line.removeprefix("data: ").encode() for line in lines if '"obfuscation"' in line]
        assert bool(padded) == asked
        assert not any(len(line) % 64 for line in padded)


async def test_the_template_gets_the_reasoning_of_earlier_answers() -> None:
    model = FakeGenerator("thinker", template="{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}")
    async with route("/v1/chat/completions", {}, model) as made:
        assert await made.prompt(messages=[{"role": "assistant", "content": "a", "reasoning_content": "why"}]) == "why|a"


async def test_the_grammar_of_a_call_is_the_schema_of_its_arguments(service: Route) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": node}, "$defs": {"node": node}}},
    }
    await service.whole(messages=HI, tools=[tool], tool_choice="required", response_format={"type": "json_object"}, max_tokens=1)
    await service.whole(messages=HI, tools=[tool, OTHER], tool_choice="required", max_tokens=1)
    one, several = (json.loads(request.grammar.source) for request in service.engine.requests if request.grammar)
    closed = {**node, "additionalProperties": False}
    assert one == {"type": "object", "properties": {"a": closed}, "$defs": {"node": closed}, "additionalProperties": False}
    assert [call["properties"]["name"]["const"] for call in several["anyOf"]] == ["f", "other"]
    assert several["$defs"]["tool0"]["properties"]["a"]["properties"]["next"] == {"$ref": "#/$defs/tool0/$defs/node"}
    assert several["$defs"]["tool1"] == {"type": "object", "properties": {}, "additionalProperties": False}, "it has no parameters"


async def test_the_arguments_of_an_earlier_call_are_an_object_for_the_template() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    model = FakeGenerator("caller", template=source)
    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 41}'}}]}
    async with client(generator_app(model)) as http:
        assert (await http.post("/v1/chat/completions", json={"messages": [called]})).status_code == 200
    assert model.decode(model.engine.requests[0].prompt) == "41"


async def test_max_completion_tokens_supersedes_max_tokens(service: Route) -> None:
    for fields, limit in (
        ({}, 64),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
    ):
        assert (await service.request(**fields)).max_tokens == limit


async def test_a_response_format_is_a_grammar(service: Route) -> None:
    rows: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"type": "text"}, None),
        ({}, None),
        ({"type": "json_object"}, Grammar(kind="json_schema", source='{"type":"object"}')),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            Grammar(kind="json_schema", source='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ),
        ({"type": "json_object", "value": {"a": 1}}, Grammar(kind="json_schema", source='{"a": 1}')),  # text-generation-inference's form
        ({"type": "json", "value": '{"a": 1}'}, Grammar(kind="json_schema", source='{"a": 1}')),
        ({"type": "json_schema", "value": {"name": "x", "schema": {"a": 1}}}, Grammar(kind="json_schema", source='{"a": 1}')),
        ({"type": "regex", "value": "a+"}, Grammar(kind="regex", source="a+")),
    ]
    for format_, grammar in rows:
        assert (await service.request(max_tokens=1, response_format=format_)).grammar == grammar, format_


async def test_a_response_format_that_cannot_be_compiled_is_named(service: Route) -> None:
    service.engine.refusal = InvalidRequest("the JSON schema cannot be used", param="grammar")
    answer = await service.post(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


# Log-probabilities -----------------------------------------------------------------------------------------------------------------------


async def test_log_probabilities_have_chats_form(service: Route) -> None:
    for fields, n_top in (({}, 0), ({"top_logprobs": 20}, 20)):
        (choice,) = (await service.whole(logprobs=True, **fields))["choices"]
        content = choice["logprobs"]["content"]
        assert (len(content), choice["logprobs"]["refusal"]) == (N_SAID, None)
        assert bytes(byte for each in content[:-1] for byte in each["bytes"]).decode() == SAID
        assert content[0] == {"token": "O", "logprob": content[0]["logprob"], "bytes": [79], "top_logprobs": content[0]["top_logprobs"]}
        assert all(len(each["top_logprobs"]) == n_top for each in content)


async def test_prompt_logprobs_stand_beside_the_choices(service: Route) -> None:
    content = await service.whole(prompt_logprobs=0)
    assert len(content["prompt_logprobs"]) == N_HI_PROMPT
    assert content["prompt_logprobs"][0] is None


# Streams ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "fields"), [(3, {"logprobs": True, "top_logprobs": 2}), (1, {"stop": "time"})])
async def test_a_stream_has_the_same_in_pieces(service: Route, n: int, fields: dict[str, Any]) -> None:
    whole = await service.whole(n=n, **fields)
    *chunks, usage, done = await service.streamed(n=n, **fields, stream_options={"include_usage": True})
    assert (done, usage["choices"], usage["usage"]) == ("[DONE]", [], whole["usage"])
    assert all((chunk["object"], chunk["usage"]) == ("chat.completion.chunk", None) for chunk in chunks)
    for wanted in whole["choices"]:
        first, *pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == wanted["index"]]
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all("role" not in piece["delta"] for piece in pieces)
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == wanted["message"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [wanted["finish_reason"]]
        if wanted["logprobs"]:
            assert [each for piece in pieces for each in piece["logprobs"]["content"]] == wanted["logprobs"]["content"]


async def test_a_prompt_that_is_too_long_is_the_fault_of_the_messages(service: Route) -> None:
    service.engine.refusal = NeverFits("the prompt has 9 tokens and the most is 8: shorten it", param="prompt")
    answer = await service.post()
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "messages")


async def test_what_is_wrong_is_a_400_that_names_it(service: Route) -> None:
    """Fields that `/v1/completions` has too are refused alike, as its table says."""
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": None}, "messages", "Field required"),
        ({"messages": []}, "messages", "cannot be empty"),
        ({"messages": "Hi"}, "messages", "valid array"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages.0.role", "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "is not a parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "'text'. Given: 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]},
            "messages.0.tool_calls",
            "only an assistant",
        ),
        ({"model": "mute"}, "model", "has no chat template: use /v1/completions, or export it"),
        ({"model": "mini"}, "model", "kind encoder"),
        ({"tools": [{"type": "code"}]}, "tools.0.type", "'function'"),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools are called 'add'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "'sub', which is not among the tools: add",
        ),
        (
            {"tools": [OTHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
            "tool_choice",
            "'add', which is not among the tools: other",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
            "tool_choice and guided_regex cannot be combined",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "is not supported: leave it out"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0 needs store_state"),
        ({"min_tokens": 9, "max_completion_tokens": 8}, "min_tokens", "more than max_completion_tokens=8"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Field required",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
            "takes no schema",
        ),
        ({"response_format": {"type": "regex"}}, "response_format.value", "of type regex"),
        ({"prompt": "x"}, "prompt", "is not a parameter"),
        ({"echo": True}, "echo", "is not supported"),
    ]
    await expect_refusals(service, rows)


# OpenAI's own client ---------------------------------------------------------------------------------------------------------------------


def test_huggingface_hubs_client_has_structured_output_and_no_model_name() -> None:
    """It sends the model "dummy" for a URL, and a schema in text-generation-inference's form."""
    model, schema = FakeGenerator("wordy"), {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with serve_in_thread(generator_app(model, default_model=("wordy",))) as url, InferenceClient(base_url=url) as hub:
        assert hub.chat_completion(HI, response_format=schema, max_tokens=64).model == "wordy"  # type: ignore[arg-type]
        assert hub.chat_completion(HI, model="tgi").model == "wordy"
    first, second = model.engine.requests
    assert (first.grammar and json.loads(first.grammar.source), second.grammar) == (SCHEMA, None)


class Sum(BaseModel):
    a: int
    b: Literal["x", "y"]


@pytest.mark.parametrize("method", [None, "function_calling", "json_schema"])
def test_langchain_structures_its_output(served: tuple[str, FakeGenerator], method: Any) -> None:
    url, model = served
    model.engine.script = '{"a": 1, "b": "y"}'
    with openai.DefaultHttpxClient() as http:
        chat = ChatOpenAI(base_url=url, api_key="none", model="wordy", max_retries=0, timeout=PATIENCE_S, http_client=http)
        structured = chat.with_structured_output(Sum, **({"method": method} if method else {}))
        assert structured.invoke("Hi") == Sum(a=1, b="y")
        assert chat.bind_tools([Sum], tool_choice="any").invoke("Hi").tool_calls[0]["args"] == {"a": 1, "b": "y"}
        model.engine.script = "no call"
        assert chat.bind_tools([Sum]).invoke("Hi").content == "no call"
