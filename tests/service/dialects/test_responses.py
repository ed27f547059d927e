"""`/v1/responses`, whole and streamed: by hand, and by OpenAI's own client."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from service.errors import InvalidRequest, Overloaded, RuntimeFailed
from service.generation.request import Grammar
from tests.service.dialects.asking import HI_PROMPT, N_HI_PROMPT, N_SAID, Route, expect_refusals, route
from tests.service.generation_fakes import SAID, FakeGenerator

LOGPROBS = "message.output_text.logprobs"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[Route]:
    mute = FakeGenerator("mute", template=None)
    async with route("/v1/responses", {"input": "Hi"}, FakeGenerator("wordy"), mute, default_max_tokens=64) as made:
        yield made


# Answers ---------------------------------------------------------------------------------------------------------------------------------


async def test_the_answer_has_openais_form(service: Route) -> None:
    content = await service.whole(metadata={"a": "b"}, temperature=0.5, instructions="Be brief")
    assert content["id"].startswith("resp_")
    assert (content["object"], content["status"], content["model"], content["store"]) == ("response", "completed", "wordy", True)
    assert (content["error"], content["incomplete_details"], content["previous_response_id"]) == (None, None, None)
    assert (content["metadata"], content["temperature"], content["top_p"], content["instructions"]) == ({"a": "b"}, 0.5, 1.0, "Be brief")
    assert content["completed_at"] >= content["created_at"]
    (message,) = content["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}]


async def test_usage_has_the_names_of_responses() -> None:
    async with route("/v1/responses", {"input": "Hi"}, FakeGenerator("wordy", prefix_cache_bytes=2**20)) as service:
        usage = [(await service.whole())["usage"] for _ in range(2)][-1]
    assert usage == {
        "input_tokens": N_HI_PROMPT,
        "input_tokens_details": {"cached_tokens": N_HI_PROMPT, "cache_write_tokens": 0},
        "output_tokens": N_SAID,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": N_HI_PROMPT + N_SAID,
    }


async def test_an_answer_that_met_its_limit_is_incomplete(service: Route) -> None:
    content = await service.whole(max_output_tokens=4)
    assert (content["status"], content["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (content["output"][0]["status"], content["output"][0]["content"][0]["text"]) == ("incomplete", "Once")
    assert content["completed_at"] is None


EARLIER = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}],
}


async def test_input_is_a_text_or_messages(service: Route) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, HI_PROMPT),
        ({"instructions": "Be brief"}, "<s><system>Be brief\n<user>Hi\n<assistant>"),
        ({"input": [{"role": "user", "content": "Hi"}]}, HI_PROMPT),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]}, HI_PROMPT),
        ({"input": [{"role": "developer", "content": "D"}, {"role": "user", "content": "Hi"}]}, "<s><system>D\n<user>Hi\n<assistant>"),
        ({"input": [EARLIER, {"role": "user", "content": "Hi"}]}, "<s><assistant>Yes?\n<user>Hi\n<assistant>"),
    ]
    for fields, prompt in rows:
        assert await service.prompt(max_output_tokens=1, **fields) == prompt


async def test_limits_seed_and_format_reach_the_engine(service: Route) -> None:
    request = await service.request(max_output_tokens=5, top_k=3, stop=["x"], text={"format": {"type": "json_object"}})
    assert (request.max_tokens, request.sampling.top_k, request.stop) == (5, 3, ("x",))
    assert request.grammar == Grammar(kind="json_schema", source='{"type":"object"}')
    assert (await service.request()).max_tokens == 64
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": True}
    content = await service.whole(text={"format": schema})
    assert content["text"]["format"]["schema"] == {"type": "null"}
    assert service.engine.requests[-1].grammar == Grammar(kind="json_schema", source='{"type": "null"}')


async def test_a_format_that_cannot_be_compiled_is_named(service: Route) -> None:
    service.engine.refusal = InvalidRequest("the JSON schema cannot be used", param="grammar")
    answer = await service.post(text={"format": {"type": "json_object"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")


async def test_log_probabilities_are_there_where_they_are_included(service: Route) -> None:
    content = await service.whole(include=[LOGPROBS], top_logprobs=2)
    logprobs = content["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == N_SAID
    assert (logprobs[0]["token"], len(logprobs[0]["top_logprobs"])) == ("O", 2)


# Streams ---------------------------------------------------------------------------------------------------------------------------------

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def same(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    (message,) = response["output"]
    rest = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at", "output", "state")}
    return {**rest, "output": {name: value for name, value in message.items() if name != "id"}}


@pytest.mark.parametrize(
    ("fields", "last"),
    [({"include": [LOGPROBS], "top_logprobs": 1, "stop": "time"}, "completed"), ({"max_output_tokens": 4}, "incomplete")],
)
async def test_events_come_in_openais_order_with_numbers(service: Route, fields: dict[str, Any], last: str) -> None:
    whole = await service.whole(**fields)
    told = await service.streamed(**fields)
    kinds = [event["type"] for event in told]
    assert list(dict.fromkeys(kinds)) == [*ORDER, f"response.{last}"]
    numbers = [event["sequence_number"] for event in told]
    assert numbers == sorted(set(numbers)), "they grow, with gaps"
    text = whole["output"][0]["content"][0]["text"]
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event["delta"] for event in deltas) == text
    assert [each for event in deltas for each in event["logprobs"]] == whole["output"][0]["content"][0]["logprobs"]
    assert same(told[-1]["response"]) == same(whole)
    by_kind = {event["type"]: event for event in told}
    assert by_kind["response.created"]["response"]["status"] == "in_progress"
    assert by_kind["response.created"]["response"]["usage"] is None
    assert by_kind["response.output_text.done"]["text"] == text
    assert by_kind["response.content_part.added"]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert by_kind["response.output_item.done"]["item"] == told[-1]["response"]["output"][0]
    assert {event["item_id"] for event in told if "item_id" in event} == {told[-1]["response"]["output"][0]["id"]}


@pytest.mark.pool
@pytest.mark.parametrize(
    ("failure", "code"), [(RuntimeFailed("broken"), "server_error"), (Overloaded("x", retry_after_s=1), "rate_limit_exceeded")]
)
async def test_a_stream_that_breaks_ends_with_failed_and_what_was_said(service: Route, failure: Exception, code: str) -> None:
    service.engine.failures[0] = (4, failure)
    told = await service.streamed()
    assert [event["sequence_number"] for event in told] == sorted({event["sequence_number"] for event in told})
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": code, "message": str(failure)})
    assert response["output"][0]["content"][0]["text"] == "Once"
    assert response["usage"]["output_tokens"] == 4
    assert not {"response.completed", "response.output_text.done"} & {event["type"] for event in told}


# Errors ----------------------------------------------------------------------------------------------------------------------------------


async def test_what_is_wrong_is_a_400_that_names_it(service: Route) -> None:
    """Fields that `/v1/completions` has too are refused alike, as its table says."""
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Previous response with id 'resp_1' not found."),
        ({"previous_response_id": "resp_1", "state": "s"}, "state", "cannot be combined"),
        ({"background": True, "store": False}, "background", "needs store=true"),
        ({"conversation": "conv_1"}, "conversation", "Conversation with id 'conv_1' not found."),
        ({"input": None}, "input", "Field required"),
        ({"input": ""}, "input", "cannot be empty"),
        ({"input": []}, "input", "cannot be empty"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'system', 'developer', 'user' or 'assistant'"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type", "'input_text'"),
        ({"model": "mute"}, "model", "has no chat template"),
        ({"min_tokens": 65}, "min_tokens", "more than max_output_tokens=64"),
        ({"max_tokens": 5}, "max_tokens", "is not a parameter"),
        ({"n": 2}, "n", "is not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"include": ["file_search"]}, "include.0", LOGPROBS),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs a schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "takes no schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'low', 'medium' or 'high'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"truncation": "left"}, "truncation", "'disabled' or 'auto'"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512"),
        ({"metadata": {str(key): "v" for key in range(17)}}, "metadata", "at most 16"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "is not a parameter"),
    ]
    await expect_refusals(service, rows)


async def test_an_answer_that_is_not_stored_is_not_found_again(service: Route) -> None:
    made = await service.whole(store=False)
    assert (made["store"], "state" in made) == (False, False)
    assert service.engine.requests[0].keep is None
    answer = await service.http.get(f"/v1/responses/{made['id']}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "response_not_found", "response_id")
    assert made["id"] in error["message"]


# OpenAI's own client ---------------------------------------------------------------------------------------------------------------------


def test_openais_client_continues_by_sending_its_answer_back(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    said = official.responses.create(model="wordy", input="Hi").output
    official.responses.create(model="wordy", input=[*said, {"role": "user", "content": "More"}])
    assert served[1].decode(served[1].engine.requests[-1].prompt) == f"<s><assistant>{SAID}\n<user>More\n<assistant>"


ADD = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}


@pytest.mark.parametrize("choice", [{"type": "function", "name": "add"}, ALLOWED])
def test_a_call_that_is_demanded_is_an_item_of_the_output(official: openai.OpenAI, served: tuple[str, FakeGenerator], choice: Any) -> None:
    served[1].engine.script = '{"a": 41}'
    asked: dict[str, Any] = {"model": "wordy", "input": "Hi", "tools": [ADD], "tool_choice": choice}
    whole = official.responses.create(**asked)
    (item,) = whole.output
    assert (item.type, item.name, item.arguments, item.status) == ("function_call", "add", '{"a": 41}', "completed")
    assert item.call_id.startswith("call_")
    assert [tool.name for tool in whole.tools] == ["add"]

    events = list(official.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert "".join(event.delta for event in events[3:-3]) == events[-3].arguments == '{"a": 41}'
    assert (events[2].item.name, events[2].item.arguments, events[-2].item.id) == ("add", "", events[2].item.id)
    assert events[-1].response.output == [events[-2].item]

    with official.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].arguments == '{"a": 41}'


def test_a_call_and_what_it_gave_are_part_of_the_conversation(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 41}', "id": "fc_1", "status": "completed"}
    gave = {"type": "function_call_output", "call_id": "c", "output": "42"}
    official.responses.create(model="wordy", input=[{"role": "user", "content": "Hi"}, called, gave], tools=[ADD])
    prompt = served[1].decode(served[1].engine.requests[0].prompt)
    assert prompt == "<s><user>Hi\n<assistant>\n<tool>42\n<assistant>"
