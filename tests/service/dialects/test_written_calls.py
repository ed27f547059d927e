"""Tool calls that a model writes by itself: what is content, what is a call, and that a division of the text changes nothing."""

from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from service.dialects.openai.written_calls import CallReader, RequiredCall, WrittenCalls, WrittenForm
from tests.service.fakes import PATIENCE_S, client, serve_in_thread
from tests.service.generation_fakes import CALL_TEMPLATE, FakeGenerator, generator_app

ADD, OTHER = '{"name": "add", "arguments": {"a": 1}}', '{"name": "other", "arguments": {"b": {"c": "}{"}}}'
MARKED, BARE, LIST = "<tool_call>", "", "["


def qwen(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def written(marker: str, *, several: bool = True) -> WrittenCalls:
    return WrittenCalls(WrittenForm(marker=marker, tools=["add", "other"], several=several), str)


def read(reader: CallReader, *texts: str) -> tuple[str, list[tuple[str | None, str]]]:
    """Return the content, and the name and arguments of each call, as a client of a stream puts them together."""
    content, calls = "", list[tuple[str | None, str]]()
    for part in [part for text in texts for part in reader.push(text)] + reader.end():
        if isinstance(part, str):
            content += part
        else:
            assert part.index == len(calls) - (not part.first)
            if part.first:
                calls.append((part.call.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    assert [(call.name, call.arguments) for call in reader.calls if call.name] == calls
    return content, calls


CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "no call": (MARKED, "It is 3 < 4.", "It is 3 < 4.", []),
    "a call": (MARKED, qwen(ADD), "", [("add", '{"a": 1}')]),
    "text before it": (MARKED, "I add.\n" + qwen(ADD), "I add.\n", [("add", '{"a": 1}')]),
    "two calls": (MARKED, qwen(ADD, OTHER), "", [("add", '{"a": 1}'), ("other", '{"b": {"c": "}{"}}')]),
    "text after a call": (MARKED, qwen(ADD) + '\nIt says {"name": 4}, {"sum": 3}.', "", [("add", '{"a": 1}')]),
    "a marker that has just begun": (MARKED, "a <tool_ca", "a <tool_ca", []),
    "a marker alone": (MARKED, "a <tool_call>\n", "a <tool_call>\n", []),
    "an unknown tool": (MARKED, qwen('{"name": "sub", "arguments": {}}'), qwen('{"name": "sub", "arguments": {}}'), []),
    "an unknown tool, then a call": (MARKED, '<tool_call>{"name": "x"<tool_call>' + ADD, '<tool_call>{"name": "x"', [("add", '{"a": 1}')]),
    "no object": (MARKED, "<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    "arguments that are no object": (
        MARKED,
        '<tool_call>{"name": "add", "arguments": 4}',
        '<tool_call>{"name": "add", "arguments": 4}',
        [],
    ),
    "a name that is cut": (MARKED, '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    "a name that is no JSON": (MARKED, qwen(r'{"name": "\q", "arguments": {}}'), qwen(r'{"name": "\q", "arguments": {}}'), []),
    "a name that does not end": (BARE, '{"name": "' + "a" * 1100, '{"name": "' + "a" * 1100, []),
    "a call after much space": (BARE, " " * 1100 + ADD, " " * 1100 + ADD, []),
    "arguments that are cut": (MARKED, '<tool_call>{"name": "add", "arguments": {"a"', "", [("add", '{"a"')]),
    "an object, if the form has no marker": (BARE, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "another text, if the form has no marker": (BARE, 'No: {"name": "add"', 'No: {"name": "add"', []),
    "a list": (LIST, f"[{ADD}, {OTHER}]", "", [("add", '{"a": 1}'), ("other", '{"b": {"c": "}{"}}')]),
    "another list": (LIST, "[1, 2]", "[1, 2]", []),
}


@pytest.mark.parametrize("name", CASES)
def test_content_and_calls_are_the_same_however_the_text_is_divided(name: str) -> None:
    marker, text, content, calls = CASES[name]
    for at in range(len(text) + 1):
        assert read(written(marker), text[:at], text[at:]) == (content, calls)
    assert read(written(marker), *text) == (content, calls)


def test_content_is_sent_before_the_answer_ends() -> None:
    reader = written(MARKED)
    assert [reader.push(text) for text in ("I add <", "b and c", " <tool_call>")] == [["I add "], ["<b and c"], [" "]]


def test_a_required_call_has_the_same_parts() -> None:
    assert read(RequiredCall("add", "1"), '{"a"', ": 1}") == ("", [("add", '{"a": 1}')])
    assert read(RequiredCall(None, "1"), *ADD) == ("", [("add", '{"a": 1}')])


# Over HTTP ------------------------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "other")]
BODY = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 400}
SAID = "I see.\n" + qwen(ADD, OTHER)


async def test_calls_are_returned_whole_and_streamed() -> None:
    model = FakeGenerator("caller", template=CALL_TEMPLATE)
    model.engine.script = SAID
    async with client(generator_app(model)) as http:

        async def ask(**fields: Any) -> dict[str, Any]:
            return (await http.post("/v1/chat/completions", json={**BODY, **fields})).json()

        (choice,) = (await ask(logprobs=True))["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I see.\n")
        assert [(each["function"]["name"], each["function"]["arguments"]) for each in choice["message"]["tool_calls"]] == CASES[
            "two calls"
        ][3]
        assert len({each["id"] for each in choice["message"]["tool_calls"]}) == 2
        assert "".join(each["token"] for each in choice["logprobs"]["content"]).startswith(SAID)
        (one,) = (await ask(parallel_tool_calls=False))["choices"]
        assert len(one["message"]["tool_calls"]) == 1
        (text,) = (await ask(tool_choice="none"))["choices"]
        assert (text["finish_reason"], text["message"]["content"]) == ("stop", SAID)
        allowed = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
        }
        (some,) = (await ask(tool_choice=allowed))["choices"]
        assert [each["function"]["name"] for each in some["message"]["tool_calls"]] == ["other"]


class Add(BaseModel):
    """add"""

    a: int


def test_clients_read_calls_in_their_default_mode() -> None:
    model = FakeGenerator("caller", template=CALL_TEMPLATE)
    model.engine.script = "I see.\n" + qwen('{"name": "Add", "arguments": {"a": 1}}')
    with (
        serve_in_thread(generator_app(model)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as official,
    ):
        asked: dict[str, Any] = {"model": "caller", "messages": BODY["messages"], "tools": [openai.pydantic_function_tool(Add)]}
        with official.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            message = stream.get_final_completion().choices[0].message
        assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        (call,) = message.tool_calls or []
        assert (message.content, call.function.parsed_arguments) == ("I see.\n", Add(a=1))
        with openai.DefaultHttpxClient() as http:
            chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="caller", max_retries=0, timeout=PATIENCE_S, http_client=http)
            answer = chat.bind_tools([Add]).invoke("Hi")
        assert [(each["name"], each["args"]) for each in answer.tool_calls] == [("Add", {"a": 1})]
        function = {"name": call.function.name, "arguments": call.function.arguments}
        called = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        again: Any = [*asked["messages"], called, result]
        official.chat.completions.create(model="caller", messages=again, tools=asked["tools"])
    assert '<tool_call>\n{"name": "Add", "arguments": {"a": 1}}\n</tool_call>' in model.decode(model.engine.requests[-1].prompt)


def test_responses_have_a_message_and_the_calls() -> None:
    model = FakeGenerator("caller", template=CALL_TEMPLATE)
    model.engine.script = SAID
    tools: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("add", "other")]
    with (
        serve_in_thread(generator_app(model)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as official,
    ):
        asked: dict[str, Any] = {"model": "caller", "input": "Hi", "tools": tools, "max_output_tokens": 400}
        answer = official.responses.create(**asked)
        message, *calls = answer.output
        assert (answer.output_text, message.type, answer.status) == ("I see.\n", "message", "completed")
        assert [(each.name, each.arguments) for each in calls] == CASES["two calls"][3]
        assert len({each.call_id for each in calls}) == 2
        one = official.responses.create(**asked, parallel_tool_calls=False)
        assert (len(one.output), one.parallel_tool_calls, answer.parallel_tool_calls) == (2, False, True)
        with official.responses.stream(**asked, include=["message.output_text.logprobs"]) as stream:
            events = list(stream)
            final = stream.get_final_response()
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I see.\n"
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [(event.output_index, event.arguments) for event in done] == [(1, '{"a": 1}'), (2, CASES["two calls"][3][1][1])]
        assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
        kinds = [event.type for event in events]
        assert kinds.index("response.function_call_arguments.delta") < kinds.index("response.output_text.done"), "as they are written"
        for at, number in enumerate(numbers[:-1], 1):
            found = events[:at] + list(official.responses.retrieve(final.id, stream=True, starting_after=number))
            assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == "I see.\n"
            told: Any = [each for event in found if event.type == "response.output_text.delta" for each in event.logprobs]
            (said,) = [event.logprobs for event in found if event.type == "response.output_text.done"] or [told]
            assert [each.token for each in told] == [each.token for each in said]
            for kind in ("added", "done"):
                items = [event.item.id for event in found if event.type == f"response.output_item.{kind}"]
                assert items == [item.id for item in final.output]
            for index, call in enumerate(final.output[1:], 1):
                new = [event for event in found if event.type == "response.function_call_arguments.delta" and event.output_index == index]
                assert "".join(event.delta for event in new) == call.arguments
                assert {event.item_id for event in new} == {call.id}
        results: Any = [{"type": "function_call_output", "call_id": each.call_id, "output": "3"} for each in calls]
        official.responses.create(model="caller", input=results, previous_response_id=answer.id)
        listed = official.responses.retrieve(answer.id)
        assert listed.output == answer.output
