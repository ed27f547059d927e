"""OpenAI: `/v1/chat/completions`, the next message of a conversation.

The model's chat template turns the conversation into a prompt, and shows tools to the model if it supports them. A call that the request
demands (`tool_choice`) comes back as `tool_calls`, see `tool_calls.py`; a call that the model writes by itself is text.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from service.dialects import accepted, generation
from service.dialects.answer_size import AnswerSize, check_size
from service.dialects.generation_schemas import (
    EMPTY_IS_ABSENT,
    MAX_TOKENS,
    STREAM,
    ChatLogprob,
    FinishReason,
    GenerationRequestBody,
    GenerationUsage,
    Ignored,
    PromptLogprobs,
    ResponseFormat,
    StopReason,
)
from service.dialects.openai import tool_calls
from service.dialects.openai.chunks import Chunks
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.token_json import slices
from service.dialects.openai.tool_calls import AllowedTools, CallBuilder, Calling, NamedTool, arguments_of
from service.errors import InvalidRequest
from service.generation.request import Delta, GenerationRequest, Grammar
from service.generation.runs import Generator, Runs
from service.http import sse
from service.http.answers import Elements, Text, done, json_answer
from service.http.fields import WITHOUT_NULLS, Fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many
from service.settings import Settings

Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16, description="Accepted and ignored."), WITHOUT_NULLS
]

_MOST_PARTS = 1024


class ContentPart(Fields):
    type: Literal["text"] = Field(description="Text alone: no model here sees or hears.")
    text: str


class FunctionCall(Fields):
    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Fields):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    others = accepted.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = Field(None, description="Only an assistant's message with tool calls may have none.")
    name: str | None = Field(None, max_length=256)
    refusal: str | None = None
    tool_calls: list[ToolCall] = Field([], max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)


class Function(Fields):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = Field(None, max_length=65_536)
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequestBody):
    others = accepted.CHAT

    messages: Many[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: StrictInt | None = Field(None, ge=1, le=MAX_TOKENS, description="The service's `default_max_tokens` without it.")
    max_tokens: StrictInt | None = Field(None, ge=1, le=MAX_TOKENS, description="The same under its old name; the other one counts.")
    logprobs: StrictBool = Field(False, description="The log-probability of each token.")
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="And of so many likeliest ones; needs `logprobs`.")
    response_format: Annotated[ResponseFormat | None, EMPTY_IS_ABSENT] = None
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = Field(
        "auto",
        description="none hides the tools from the model, auto shows them to it; required, or a tool's name, has one called; "
        "allowed_tools is auto or required for some of them.",
    )
    parallel_tool_calls: StrictBool | None = Field(None, description="Accepted and ignored: an answer has one call at most.")
    store: Literal[False] = Field(False, description="Nothing is stored.")
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted and ignored.")
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @field_validator("messages", mode="before")
    @classmethod
    def _not_too_many(cls, messages: Any) -> Any:
        """Limit the parts and calls of all messages together, since validating them blocks the event loop."""
        if isinstance(messages, list):
            inner = (message.get(name) for message in messages if isinstance(message, dict) for name in ("content", "tool_calls"))
            if (count := sum(len(each) for each in inner if isinstance(each, list))) > _MOST_PARTS:
                said = f"the messages have {count} parts and tool calls, and the most is {_MOST_PARTS}: send fewer"
                raise PydanticCustomError("too_long", said)
        return messages


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="Null where a tool is called.")
    refusal: None
    annotations: list[Any]
    tool_calls: list[ToolCall] | None = Field(None, description="Only where `tool_choice` demands a call.")


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: StopReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: GenerationUsage
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Only where the request asked for them.")


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM)
async def chat(body: ChatRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """The assistant's next message, n times. With `stream`, a chunk for what has come since the last one; the first has the role."""
    model = catalog.generator(body.model)
    _check(body)
    tool_calls.unique([tool.function.name for tool in body.tools])
    choice, allowed = _chosen(body)
    tools = [tool.model_dump(exclude_none=True) for tool in allowed] if choice != "none" else []
    calling = Calling.of(choice, {tool.function.name: tool.function.parameters for tool in allowed})
    prompt = await generation.encode_chat(model, catalog, messages_of(body.messages), tools, "messages")
    asked = generation.requests(
        body,
        [prompt],
        model,
        call,
        n=body.n,
        max_tokens=body.max_completion_tokens or body.max_tokens or catalog.settings.default_max_tokens,
        max_tokens_field="max_tokens" if body.max_tokens and not body.max_completion_tokens else "max_completion_tokens",
        grammar=generation.grammar_of(body, _format(body.response_format), "response_format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    if not body.stream:
        _check_size(body, model, asked[0], catalog.settings)
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="messages", stream=body.stream)
    if body.stream:
        generation.bound_unread(runs, asked[0].top_logprobs, catalog.settings)
        return await sse.stream(runs, _ChatStream(body, model, runs, calling), call, catalog.settings)
    return json_answer(await _ChatAnswer(body, model, runs, calling).answer(), call.headers)


def _check_size(body: ChatRequest, model: Generator, asked: GenerationRequest, settings: Settings) -> None:
    size, tokens = AnswerSize(model.vocabulary), generation.most_tokens(model, asked.max_tokens, len(asked.prompt))
    each = size.text(tokens) + size.chat_logprobs(tokens, asked.top_logprobs)
    once = size.prompt_logprobs(len(asked.prompt), body.prompt_logprobs)
    fields = [
        *(["n"] if body.n > 1 else []),
        "max_tokens" if body.max_tokens and not body.max_completion_tokens else "max_completion_tokens",
    ]
    fields += [name for name in ("top_logprobs", "prompt_logprobs") if getattr(body, name)]
    check_size(each + -(-once // body.n), body.n, settings, fields=", ".join(fields), streamable=body.prompt_logprobs is None)


def _chosen(body: ChatRequest) -> tuple[str, list[Tool]]:
    """The choice, as `Calling.of` takes it, and the tools that it is about."""
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        return choice.allowed_tools.mode, tool_calls.only(names, {tool.function.name: tool for tool in body.tools})
    return choice if isinstance(choice, str) else json.dumps(choice.function.name), body.tools


def _check(body: ChatRequest) -> None:
    """Check fields that depend on each other, which a schema cannot."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false", param="prompt_logprobs")
    generation.check_streaming(body.stream, body.stream_options)


def _format(given: ResponseFormat | None) -> Grammar | None:
    if given is None:
        return None
    return generation.format_grammar(given.type, given.json_schema.schema_ if given.json_schema else None, "response_format.json_schema")


def messages_of(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for templates: content is one text, and the arguments of a call are an object."""
    messages = []
    for at, message in enumerate(given):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise InvalidRequest(f"messages.{at}.content is missing", param=f"messages.{at}.content")
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(f"messages.{at}.tool_calls: only an assistant calls tools", param=f"messages.{at}.tool_calls")
        plain = message.model_dump(exclude_none=True, exclude_defaults=True)
        if isinstance(message.content, list):
            plain["content"] = "\n".join(part.text for part in message.content)  # as in vLLM
        for called in plain.get("tool_calls", ()):
            called["type"] = "function"
            called["function"]["arguments"] = arguments_of(called["function"]["arguments"])
        messages.append({"content": "", **plain})
    return messages


class _ChatAnswer(Chunks):
    """An answer without streaming, serialised while its tokens arrive."""

    def __init__(self, body: ChatRequest, model: Generator, runs: Runs, calling: Calling | None) -> None:
        super().__init__(model, runs, None, id_prefix="chatcmpl-", object_="chat.completion")
        self._body = body
        self._calling = calling

    def _begin(self) -> None:
        self._texts = [Text() for _ in range(self._body.n)]
        self._calls = [None if self._calling is None else self._calling.call() for _ in range(self._body.n)]
        self._logprobs = [Elements() for _ in range(self._body.n)]
        self._last = [Delta("") for _ in range(self._body.n)]

    async def answer(self) -> dict[str, Any]:
        await self.runs.read(self._begin, self._add)
        choices = [self._choice(index) for index in range(self._body.n)]
        answer: dict[str, Any] = {**self.head, "choices": choices, "usage": generation.usage_of(self.runs)}
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = told = Elements()
            await done(map(told.add, map(self.tokens.prompt, slices(self.runs.runs[0].prompt_logprobs))))
        return answer

    def _add(self, index: int, delta: Delta) -> None:
        if (called := self._calls[index]) is None:
            self._texts[index].add(delta.text)
        else:
            called.push(delta.text)
        if self._body.logprobs:
            self._logprobs[index].add(self.tokens.chat(delta.logprobs))
        self._last[index] = delta

    def _choice(self, index: int) -> dict[str, Any]:
        last, called = self._last[index], self._calls[index]
        message: dict[str, Any] = {"role": "assistant", "content": self._texts[index], "refusal": None, "annotations": []}
        if called is not None:
            message |= {"content": None, "tool_calls": [called.json()]}
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs[index], "refusal": None} if self._body.logprobs else None,
            "finish_reason": last.finish_reason if called is None else tool_calls.finish_reason(last),
            "stop_reason": last.stop_reason,
        }


class _ChatStream(Chunks):
    """The events of a stream."""

    def __init__(self, body: ChatRequest, model: Generator, runs: Runs, calling: Calling | None) -> None:
        super().__init__(model, runs, body.stream_options, id_prefix="chatcmpl-", object_="chat.completion.chunk")
        self._body = body
        self._calls = [None if calling is None else calling.call() for _ in runs.runs]
        self._named = [False for _ in runs.runs]  # whether the call's id and name were sent

    def opening(self) -> bytes:
        """The role of each choice's message."""
        role = {"role": "assistant", "content": "" if self._calls[0] is None else None, "refusal": None}
        return b"".join(self.chunk([_began(index, role)]) for index in range(self._body.n))

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join([self.chunk([self._choice(index, delta)]) for index, delta in pieces if generation.worth_sending(delta)])

    def _choice(self, index: int, new: Delta) -> dict[str, Any]:
        """What this delta adds to the choice."""
        called = self._calls[index]
        return {
            "index": index,
            "delta": ({"content": new.text} if new.text else {}) if called is None else self._of_call(index, called, new.text),
            "logprobs": {"content": self._logprobs(new), "refusal": None} if self._body.logprobs else None,
            "finish_reason": new.finish_reason if called is None else tool_calls.finish_reason(new),
            "stop_reason": new.stop_reason,
        }

    def _logprobs(self, new: Delta) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % self.tokens.chat(new.logprobs))

    def _of_call(self, index: int, called: CallBuilder, text: str) -> dict[str, Any]:
        """First its id and name, then its arguments as they arrive."""
        arguments = called.push(text)
        if called.name is not None and not self._named[index]:
            self._named[index] = True
            return {"tool_calls": [{"index": 0, **called.json(), "function": {"name": called.name, "arguments": arguments}}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {}


def _began(index: int, role: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
