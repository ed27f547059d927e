"""The route `/v1/chat/completions` of OpenAI, which generates the next message of a conversation.

The model's chat template turns the conversation into a prompt, and shows tools to the model if it supports them. A tool call
that the request requires (`tool_choice`) is returned as `tool_calls`; see `tool_calls.py`. A call that the model writes by
itself is returned as text.
"""

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter

from service.call import LAST_EVENT_HEADER, Call
from service.catalog import Catalog
from service.dialects import generation, resuming
from service.dialects.answer_size import check_chat_size
from service.dialects.generation_schemas import (
    STREAM,
)
from service.dialects.openai import tool_calls
from service.dialects.openai.chat_schemas import ChatCompletion, ChatMessage, ChatRequest
from service.dialects.openai.chunks import Chunks
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.token_json import slices
from service.dialects.openai.tool_calls import AllowedTools, Calling, arguments_of, choose
from service.dialects.resuming import AnswerStart, Resumable
from service.dialects.states import turns
from service.errors import InvalidRequest
from service.generation.chat.continuation import turn_of
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http.answers import Elements, Text, done, json_answer
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.streams.position import EventId
from service.streams.source import Received

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


PATH = "/v1/chat/completions"


@router.post(PATH, response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return n choices of the next message. With `stream`, chunks contain new text, and a choice's first chunk has the role."""
    if body.stream and call.last_event_id is not None:
        wanted = EventId.parse(call.last_event_id, LAST_EVENT_HEADER)
        return await resuming.resume(wanted, {PATH: Resumable(ChatRequest, answer)}, call, catalog)
    return await answer(body, call, catalog)


async def answer(body: ChatRequest, call: Call, catalog: Catalog, start: AnswerStart | None = None) -> Any:
    """Answer a request. If the answer continues an interrupted stream, `start` has the stream's seeds, id and position, else it is None."""
    begin = await turns.beginning_of(catalog, call, body.state, body.exact, "state")
    model = catalog.generator(body.model or (None if begin is None else begin.record.model))
    turns.check_model(model, begin)
    field = "max_tokens" if body.max_tokens is not None and body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = catalog.settings.default_max_tokens if (given := getattr(body, field)) is None else given
    _check(body, max_tokens, field)
    if start is None or start.continued is None:
        await turns.check_name(body, catalog, call)
    tools, calling = _tools(body)
    messages = messages_of(body.messages)
    answered = max_tokens > 0
    prompt = await turns.next_messages(model, catalog, messages, tools, "messages", begin, add_generation_prompt=answered)
    if calling is not None and answered:
        prompt = [*prompt, *await calling.opening(model, tools)]
    format_ = None
    if (wanted := body.response_format) is not None:
        schema = wanted.json_schema.schema_ if wanted.json_schema else None
        format_ = generation.format_grammar(wanted.type, schema, "response_format.json_schema")
    start = start or AnswerStart.new("chatcmpl-", body.seed, 1)
    asked = generation.requests(
        body,
        [prompt],
        model,
        call,
        n=body.n,
        max_tokens=max_tokens,
        max_tokens_field=field,
        grammar=generation.grammar_of(body, format_, "response_format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        drawn=start.seeds,
    )
    turn = "generated" if answered else turn_of(messages)
    asked = turns.with_states(asked, body, begin, model=model, catalog=catalog, call=call, turn=turn)
    if not body.stream:
        fields = {"n": body.n > 1, field: True, "top_logprobs": body.top_logprobs, "prompt_logprobs": body.prompt_logprobs}
        check_chat_size(model, asked[0], catalog.settings, n=body.n, fields=fields, streamable=body.prompt_logprobs is None)
    if body.stream:
        asked = start.of_stream(asked, model)
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="messages", stream=body.stream)
    turns.tell_exactness(call, begin, runs)
    if body.stream:
        generation.bound_unread(runs, asked[0].top_logprobs, catalog.settings)
        script = _ChatAnswer(body, model, runs, calling, start)
        again = body.model_copy(update={"model": model.name, "max_completion_tokens": max_tokens, "state": begin and begin.record.id})
        return await resuming.stream(script, again, start, model, call, catalog, path=PATH, durability=body.durability)
    return json_answer(await _ChatAnswer(body, model, runs, calling, start).whole(), call.headers)


def _tools(body: ChatRequest) -> tuple[list[dict[str, Any]], Calling | None]:
    functions, choice = [tool.function for tool in body.tools], body.tool_choice
    if isinstance(choice, AllowedTools):
        return choose(choice.allowed_tools.mode, choice.allowed_tools.tools, functions)
    return choose(choice, None, functions) if isinstance(choice, str) else choose("required", [choice], functions, show_all=True)


def _check(body: ChatRequest, max_tokens: int, field: str) -> None:
    """Raise InvalidRequest if the fields violate a constraint that a schema cannot express.

    `field` is the name of the field in the body from which `max_tokens` was read.
    """
    if not max_tokens and not body.store_state:
        raise InvalidRequest(f"{field}=0 needs store_state: there would be nothing to answer", param=field)
    turns.check_prompt_logprobs(body.prompt_logprobs, body.state)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false", param="prompt_logprobs")
    generation.check_streaming(body.stream, body.stream_options)


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
    """The text of a choice while its tokens arrive, or the tool call if the request requires one."""

    def __init__(self, calling: Calling | None, name: str) -> None:
        """`calling` is the required tool call, or None. `name` is the answer's id and the choice's index. The tool call's id is derived
        from `name`, so it is the same when another process continues the stream."""
        self.text, self.logprobs, self.last = Text(), Elements(), Delta("")
        self.call = None if calling is None else calling.call(generation.derived_id("call_", name))
        self.named = False  # whether a chunk with the tool call's id and name was built


class _ChatAnswer(Chunks):
    """Builds the answer to a chat request, as a whole or as the chunks of a stream."""

    def __init__(self, body: ChatRequest, model: Generator, runs: Runs, calling: Calling | None, start: AnswerStart) -> None:
        object_ = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(model, runs, body.stream_options, start, object_=object_)
        self._body, self._calling = body, calling
        self._begin()

    def _begin(self) -> None:
        self._choices = [_Choice(self._calling, f"{self.head['id']}/{index}") for index in range(self._body.n)]

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer. Its parts are serialised while the tokens arrive."""
        await self.runs.read(self._begin, self._add)
        answer = self.answer([self._whole_choice(index, choice) for index, choice in enumerate(self._choices)])
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = told = Elements()
            await done(map(told.add, map(self.tokens.prompt, slices(self.runs.runs[0].prompt_logprobs))))
        return answer

    def _add(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.last = delta
        if choice.call is None:
            choice.text.add(delta.text)
        else:
            choice.call.push(delta.text)
        if self._body.logprobs:
            choice.logprobs.add(self.tokens.chat(delta.logprobs))

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        content, calls = (choice.text, {}) if choice.call is None else (None, {"tool_calls": [choice.call.json()]})
        message = {"role": "assistant", "content": content, "refusal": None, "annotations": [], **calls}
        return self._form(index, {"message": message}, choice.logprobs, choice.last)

    def _form(self, index: int, message: dict[str, Any], logprobs: Any, last: Delta) -> dict[str, Any]:
        return {
            "index": index,
            **message,
            "logprobs": {"content": logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": last.finish_reason if self._calling is None else tool_calls.finish_reason(last),
            "stop_reason": last.stop_reason,
            **self.state(index, last),
        }

    def opening(self) -> bytes:
        """Return one chunk with the message's role for each choice. Skip choices of which the client has received a part already."""
        role = {"role": "assistant", "content": "" if self._calling is None else None, "refusal": None}
        begun = {"delta": role, "logprobs": None, "finish_reason": None}
        opened = b""
        for index in range(self._body.n):
            if self.places[index].untouched:
                self.begin(index)
                opened += self.chunk([{"index": index, **begun}])
        return opened

    async def skip(self, index: int, part: Received) -> None:
        choice = self._choices[index]
        if choice.call is not None:
            choice.call.push(part.text)
            choice.named = choice.call.name is not None and bool(part.text or (self._body.logprobs and part.token_ids))

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._choices[index]
        new: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if choice.call is not None:  # the first chunk of a tool call has the call's id and name
            function = {"arguments": choice.call.push(delta.text)}
            new = {"tool_calls": [{"index": 0, "function": function}]} if function["arguments"] else {}
            if choice.call.name is not None and not choice.named:
                choice.named = True
                new = {"tool_calls": [{"index": 0, **choice.call.json(), "function": {"name": choice.call.name, **function}}]}
        logprobs = orjson.Fragment(b"[%b]" % self.tokens.chat(delta.logprobs)) if self._body.logprobs else None
        return self._form(index, {"delta": new}, logprobs, delta)
