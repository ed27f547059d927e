"""The route `/v1/chat/completions` of OpenAI, which generates the next message of a conversation.

The model's chat template turns the conversation into a prompt, and shows tools to the model if it supports them. A tool call
that the request requires (`tool_choice`), or that the model writes by itself in its template's form, is returned as `tool_calls`; see
`tool_calls.py` and `written_calls.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter

from service.dialects.openai import tool_calls
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.tool_calls import Calling, arguments_of, choose
from service.dialects.openai.written_calls import CallPart, CallReader, RequiredCall, WrittenCalls, content_of, written_form
from service.dialects.text.answer import check_chat_size, derived_id
from service.dialects.text.chunks import Chunks
from service.dialects.text.grammars import format_grammar, grammar_of, value_grammar
from service.dialects.text.logprobs import slices
from service.dialects.text.pipeline import AnswerStart, Plan, TextRoute
from service.dialects.text.request import TextCall, check_prompt_logprobs, check_streaming
from service.dialects.text.schemas import STREAM, ChatCompletion, ChatMessage, ChatRequest, ResponseFormat
from service.errors import InvalidRequest
from service.generation.chat.continuation import turn_of
from service.generation.model import DecoderModel, Generator
from service.generation.request import Delta, GenerationRequest, Grammar
from service.generation.runs import Runs
from service.http.answers import Elements, Text, done
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.streams.source import Received

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return n choices of the next message. With `stream`, chunks contain new text, and a choice's first chunk has the role."""
    return await ROUTE.answer(body, call, catalog)


async def _plan(body: ChatRequest, text: TextCall[DecoderModel]) -> Plan:
    field = "max_tokens" if body.max_tokens is not None and body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = text.catalog.settings.default_max_tokens if (given := getattr(body, field)) is None else given
    _check(body, max_tokens, field)
    tools, calling = choose(body.tool_choice, [tool.function for tool in body.tools])
    messages = messages_of(body.messages)
    answered = max_tokens > 0
    prompt = await text.messages(messages, tools, "messages", add_generation_prompt=answered)
    if calling is not None and answered:
        prompt = [*prompt, *await calling.opening(text.model, tools)]
    reader = await _reader(body, text.model, tools, calling)

    def check_size(request: GenerationRequest) -> None:
        if not body.stream:
            fields = {"n": body.n > 1, field: True, "top_logprobs": body.top_logprobs, "prompt_logprobs": body.prompt_logprobs}
            streamable = body.prompt_logprobs is None
            check_chat_size(text.model, request, text.catalog.settings, n=body.n, fields=fields, streamable=streamable)

    return Plan(
        prompts=[prompt],
        max_tokens=max_tokens,
        max_tokens_field=field,
        check_size=check_size,
        answer=partial(_ChatAnswer, body, text.model, reader),
        grammar=grammar_of(body, _format(body.response_format), "response_format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        turn="generated" if answered else turn_of(messages),
        stored={"max_completion_tokens": max_tokens},
    )


async def _reader(
    body: ChatRequest, model: Generator, tools: Sequence[dict[str, Any]], calling: Calling | None
) -> Callable[[str], CallReader] | None:
    """Return how the tool calls of a choice are read, given the name from which their ids are derived, or None if it is only text.

    An id is the same when another process continues the stream.
    """
    if calling is not None:
        only = calling.only
        return lambda name: RequiredCall(only, derived_id("call_", name))
    form = await written_form(model, tools, skip_special_tokens=body.skip_special_tokens, several=body.parallel_tool_calls)
    return form and (lambda name: WrittenCalls(form, lambda at: derived_id("call_", f"{name}/{at}")))


def _format(wanted: ResponseFormat | None) -> Grammar | None:
    """Return the grammar that the field `response_format` demands, or None."""
    if wanted is None:
        return None
    if wanted.value is not None and wanted.type != "text" and wanted.json_schema is None:
        return value_grammar(wanted.type, wanted.value, "response_format")
    if wanted.value is not None or wanted.type in ("json", "regex"):
        said = f"response_format of type {wanted.type}: `value` and one of json_object, json, json_schema or regex go together"
        raise InvalidRequest(said, param="response_format.value")
    return format_grammar(wanted.type, wanted.json_schema.schema_ if wanted.json_schema else None, "response_format.json_schema")


def _check(body: ChatRequest, max_tokens: int, field: str) -> None:
    """Raise InvalidRequest if the fields violate a constraint that a schema cannot express.

    `field` is the name of the field in the body from which `max_tokens` was read.
    """
    if not max_tokens and not body.store_state:
        raise InvalidRequest(f"{field}=0 needs store_state: there would be nothing to answer", param=field)
    check_prompt_logprobs(body.prompt_logprobs, body.state, stream=body.stream)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    check_streaming(body.stream, body.stream_options)


def messages_of(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for the chat template. The parts of a content are joined to one text. The arguments of a tool call, which are a
    string of JSON, are parsed. Raises InvalidRequest if a message lacks its content, or has tool calls and is not the assistant's."""
    messages = []
    for at, message in enumerate(given):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise InvalidRequest(f"messages.{at}.content is missing", param=f"messages.{at}.content")
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(f"messages.{at}.tool_calls: only an assistant calls tools", param=f"messages.{at}.tool_calls")
        plain = message.model_dump(exclude_none=True, exclude_defaults=True)
        if isinstance(message.content, list):
            plain["content"] = "\n".join(part.text for part in message.content)  # vLLM joins the parts of a message in the same way
        for called in plain.get("tool_calls", ()):
            called["type"] = "function"
            called["function"]["arguments"] = arguments_of(called["function"]["arguments"])
        messages.append({"content": "", **plain})
    return messages


class _Choice:
    """The text and the tool calls of a choice while its tokens arrive."""

    def __init__(self, reader: CallReader | None) -> None:
        self.text, self.logprobs, self.last, self.reader = Text(), Elements(), Delta(""), reader

    def read(self, delta: Delta) -> list[str | CallPart]:
        """Return the new content (str) and the new parts of tool calls."""
        if self.reader is None:
            return [delta.text] if delta.text else []
        return [*self.reader.push(delta.text), *(self.reader.end() if delta.finish_reason is not None else ())]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [] if self.reader is None else [call.json() for call in self.reader.calls]

    def finish_reason(self, delta: Delta) -> str | None:
        return tool_calls.finish_reason(delta) if self.reader is not None and self.reader.calls else delta.finish_reason


class _ChatAnswer(Chunks):
    """Builds the answer to a chat request, as a whole or as the chunks of a stream."""

    def __init__(
        self, body: ChatRequest, model: Generator, reader: Callable[[str], CallReader] | None, runs: Runs, start: AnswerStart
    ) -> None:
        object_ = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(model, runs, body.stream_options, start, object_=object_)
        self._body = body
        self._choices = [_Choice(reader and reader(f"{start.id}/{index}")) for index in range(body.n)]

    async def whole(self) -> dict[str, Any]:
        await self.runs.read(self._add)
        answer = self.answer([self._whole_choice(index, choice) for index, choice in enumerate(self._choices)])
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = told = Elements()
            await done(map(told.add, map(self.tokens.prompt, slices(self.runs.runs[0].prompt_logprobs))))
        return answer

    def _add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.last = delta
        choice.text.add(content_of(choice.read(delta)))
        if self._body.logprobs:
            choice.logprobs.add(self.tokens.chat(delta.logprobs))

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        calls = {"tool_calls": choice.calls} if choice.calls else {}
        content = None if calls and not choice.text else choice.text
        message = {"role": "assistant", "content": content, "refusal": None, "annotations": [], **calls}
        return self._form(index, {"message": message}, choice.logprobs, choice.last)

    def _form(self, index: int, message: dict[str, Any], logprobs: Any, last: Delta) -> dict[str, Any]:
        return {
            "index": index,
            **message,
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": self._choices[index].finish_reason(last),
            "stop_reason": last.stop_reason,
            **self.state(index, last),
        }

    def opening(self) -> bytes:
        """Return one chunk with the message's role for each choice. Skip choices of which the client has received a part already."""
        required = any(choice.calls for choice in self._choices)
        role = {"role": "assistant", "content": None if required else "", "refusal": None}
        begun = {"delta": role, "logprobs": None, "finish_reason": None}
        opened = b""
        for index in range(self._body.n):
            if self.places[index].untouched:
                self.begin(index)
                opened += self.chunk([{"index": index, **begun}])
        return opened

    async def skip(self, index: int, part: Received) -> None:
        if part.text or (self._body.logprobs and part.token_ids):
            self._choices[index].read(Delta(part.text))

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        parts = self._choices[index].read(delta)
        content, calls = content_of(parts), [part.json() for part in parts if isinstance(part, CallPart)]
        new = {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}
        logprobs = orjson.Fragment(b"[%b]" % self.tokens.chat(delta.logprobs)) if self._body.logprobs else None
        return self._form(index, {"delta": new}, logprobs, delta)


ROUTE = TextRoute(path="/v1/chat/completions", body=ChatRequest, id_prefix="chatcmpl-", prompt_field="messages", plan=_plan)
