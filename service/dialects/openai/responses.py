"""The route `/v1/responses` of OpenAI, which returns an answer to a text or a conversation.

Answers are not stored. So `store` is false by default, and `store=true` or continuing an answer by its id is an error.
Additions: the sampling fields of `SamplingFields`. Streamed events have OpenAI's order, are numbered from 0, and end with
`response.completed`, `response.incomplete` or `response.failed`. There is no `[DONE]`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, Discriminator, Field, StrictBool, StrictInt, Tag

from service.dialects import accepted, generation
from service.dialects.answer_size import check_chat_size
from service.dialects.generation_schemas import (
    EMPTY_IS_ABSENT,
    MAX_TOKENS,
    STREAM,
    ChatLogprob,
    Ignored,
    KeptState,
    SamplingFields,
    TextFormat,
)
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.token_json import token_json
from service.dialects.openai.tool_calls import Calling, Function, FunctionName, FunctionType, arguments_of, choose
from service.dialects.states import turns
from service.dialects.states.options import Metadata, StateFields
from service.errors import EmptyInput, InvalidRequest, ServiceError
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import Elements, Text, json_answer
from service.http.fields import Fields
from service.http.routing import CallDep, CatalogDep, JsonRoute, Many

LOGPROBS: Literal["message.output_text.logprobs"] = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_NOT_STORED = "answers are not stored by this service"


class InputPart(Fields):
    """A part of a message. A part of an answer can be sent back unchanged."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], description="Accepted and ignored.")


class InputItem(Fields):
    """A message. A message of an answer can be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[InputPart]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(Fields):
    """A tool call of an earlier answer, sent back by the client."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(max_length=256)
    arguments: str
    id: Ignored = None
    status: Ignored = None


class CallOutputItem(Fields):
    """The output of a tool, sent by the client."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: str | Many[InputPart]
    id: Ignored = None
    status: Ignored = None


def _kind(item: Any) -> str:
    """Return Pydantic's union tag of an item. Tags contain a hyphen, so that error messages can leave them out of field names."""
    type_ = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return {"function_call": "a-call", "function_call_output": "an-output"}.get(type_ if isinstance(type_, str) else "", "a-message")


Item = Annotated[
    Annotated[InputItem, Tag("a-message")] | Annotated[CallItem, Tag("a-call")] | Annotated[CallOutputItem, Tag("an-output")],
    Discriminator(_kind),
]


class FunctionTool(Function, FunctionType): ...


class NamedFunction(FunctionName, FunctionType): ...


class AllowedFunctions(Fields):
    """The tools that may be called. With mode `auto` they are only shown to the model; with `required` it must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=128)


class TextConfig(Fields):
    format: Annotated[TextFormat | None, EMPTY_IS_ABSENT] = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted and ignored.")


class ResponseStreamOptions(Fields):
    include_obfuscation: Literal[False] = Field(False, description="Nothing is padded here.")


class ResponseRequest(SamplingFields, StateFields):
    others = accepted.RESPONSES

    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first decoder without it.")
    input: str | Annotated[Many[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: StrictInt | None = Field(None, ge=1, le=MAX_TOKENS, description="The service's `default_max_tokens` without it.")
    text: TextConfig | None = None
    include: list[Include] = Field([], max_length=16, description="What belongs to tools, pictures or reasoning adds nothing here.")
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="Likeliest tokens beside each token; needs `include`.")
    metadata: Metadata = Field({})
    stream: StrictBool = False
    stream_options: ResponseStreamOptions | None = None
    store: StrictBool = Field(False, description="True is refused: answers are not stored.")
    previous_response_id: str | None = Field(None, max_length=256, description="Refused: answers are not stored.")
    background: Literal[False] = False
    truncation: Literal["disabled", "auto"] = Field("disabled", description="Nothing is cut, with auto neither.")
    tools: list[FunctionTool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = Field(
        "auto",
        description="none hides the tools from the model, auto shows them to it; required, or a tool's name, has one called; "
        "allowed_tools is auto or required for some of them.",
    )
    parallel_tool_calls: StrictBool | None = Field(None, description="Accepted and ignored: an answer has one call at most.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted and ignored.")
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
    tools: list[FunctionTool]
    truncation: Literal["disabled"]
    background: Literal[False]
    usage: ResponseUsage | None
    state: KeptState | None = Field(None, description="Only where the request asked for it, when the response has ended.")


class ResponseNotFound(ServiceError):
    status = 404
    code = "response_not_found"


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAM)
async def responses(body: ResponseRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the model's answer, with `stream` as events while it is generated. Requests that need stored answers get a 400."""
    begin = await turns.beginning_of(catalog, call, body.state, body.exact, "state")
    model = catalog.generator(body.model or (None if begin is None else begin.record.model))
    turns.check_model(model, begin)
    _check(body)
    await turns.check_name(body, catalog, call)
    tools, calling = _tools(body)
    prompt = await turns.next_messages(model, catalog, _messages(body), tools, "input", begin)
    format_ = body.text.format if body.text else None
    grammar = generation.format_grammar(format_.type, format_.schema_, "text.format.schema") if format_ else None
    asked = generation.requests(
        body,
        [prompt],
        model,
        call,
        max_tokens=body.max_output_tokens or catalog.settings.default_max_tokens,
        max_tokens_field="max_output_tokens",
        grammar=generation.grammar_of(body, grammar, "text.format", calling.grammar() if calling else None),
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in body.include else None,
    )
    asked = turns.with_states(asked, body, begin, model=model, catalog=catalog, call=call, turn="generated")
    # Streams are checked too, since their last event contains the whole answer.
    check_chat_size(model, asked[0], catalog.settings, fields={"max_output_tokens": True, "top_logprobs": body.top_logprobs})
    runs = await Runs.submit(model, asked, call, n=1, prompt_field="input", stream=body.stream)
    answer = _ResponseAnswer(body, model, runs, calling)
    if body.stream:
        generation.bound_unread(runs, asked[0].top_logprobs, catalog.settings)
        return await sse.stream(runs, answer, call, catalog.settings)
    await runs.read(answer.begin, answer.add)
    return json_answer(answer.ended(), call.headers)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def response(response_id: str) -> Any:
    """Always return 404: answers are not stored."""
    raise ResponseNotFound(f"Response with id '{response_id}' not found: {_NOT_STORED}", param="response_id")


def _tools(body: ResponseRequest) -> tuple[list[dict[str, Any]], Calling | None]:
    choice = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        return choose(choice.mode, choice.tools, body.tools)
    return choose(choice, None, body.tools) if isinstance(choice, str) else choose("required", [choice], body.tools, show_all=True)


def _check(body: ResponseRequest) -> None:
    """Check constraints that a schema cannot express."""
    if body.store:
        raise InvalidRequest(f"store=true is not supported: {_NOT_STORED}; send store=false or leave it out", param="store")
    if body.previous_response_id:
        raise InvalidRequest(
            f"previous_response_id is not supported: {_NOT_STORED}; send the conversation as `input`", param="previous_response_id"
        )
    if body.top_logprobs and LOGPROBS not in body.include:
        raise InvalidRequest(f'top_logprobs needs include=["{LOGPROBS}"]', param="top_logprobs")
    if body.input == "":
        raise EmptyInput("`input` cannot be empty", param="input")


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    return [*first, *map(_message, body.input)]


def _message(item: InputItem | CallItem | CallOutputItem) -> dict[str, Any]:
    """Convert an item to a message for the chat template."""
    if isinstance(item, CallItem):
        called = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments_of(item.arguments)}}
        return {"role": "assistant", "content": "", "tool_calls": [called]}
    content = item.output if isinstance(item, CallOutputItem) else item.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    return {"role": item.role, "content": text}


class _ResponseAnswer(sse.Script[tuple[int, Delta]]):
    """Builds a response while its tokens arrive, or the events of a streamed response."""

    def __init__(self, body: ResponseRequest, model: Generator, runs: Runs, calling: Calling | None) -> None:
        self._body, self._model, self._runs = body, model, runs
        self._calling = calling
        self._begun = False  # whether the event that begins a tool call was sent
        self._id = generation.new_id("resp_")
        self._item_id = generation.new_id("msg_" if calling is None else "fc_")
        self._created = generation.now()
        self._tokens = token_json(model.vocabulary)
        self._number = 0  # sequence number of the next event
        self.begin()

    def begin(self) -> None:
        """Reset the response. Called again if the generation restarts after the loss of a replica."""
        self._call = None if self._calling is None else self._calling.call()
        self._text, self._logprobs = Text(), Elements()
        self._last = Delta("")

    def add(self, index: int, delta: Delta) -> tuple[str, bytes]:
        """Add a delta. Returns its text, or its part of the tool call's arguments, and log-probabilities as JSON list elements."""
        self._last = delta
        self._logprobs.add(logprobs := self._tokens.chat(delta.logprobs))
        if self._call is not None:
            return self._call.push(delta.text), logprobs
        self._text.add(delta.text)
        return delta.text, logprobs

    def ended(self) -> dict[str, Any]:
        """Return the whole response. Call this after the last delta."""
        output = [self._item(self._status)]
        if self._status == "completed":
            return self._response("completed", output=output)
        return self._response("incomplete", output=output, incomplete_details={"reason": "max_output_tokens"})

    @property
    def _status(self) -> str:
        return "completed" if self._last.finish_reason == "stop" else "incomplete"

    def _item(self, status: str) -> dict[str, Any]:
        if self._call is None:
            content = [] if status == "in_progress" else [self._part()]
            return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        called = {"call_id": self._call.id, "name": self._call.name or "", "arguments": self._call.arguments}
        return {"id": self._item_id, "type": "function_call", "status": status, **called}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _response(self, status: str, **said: Any) -> dict[str, Any]:
        body, runs = self._body, self._runs
        state = turns.kept(runs.runs[0].request)
        usage = {
            "input_tokens": runs.prompt_tokens,
            "input_tokens_details": {"cached_tokens": runs.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": runs.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": runs.prompt_tokens + runs.completion_tokens,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": generation.now() if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._model.name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [{"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in body.tools],
            "truncation": "disabled",
            "background": False,
            "usage": usage if status != "in_progress" else None,
            **({"state": state} if state is not None and status in ("completed", "incomplete") else {}),
            **said,
        }

    # As a stream -----------------------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        begun = self._response("in_progress")
        said = self._event("created", response=begun) + self._event("in_progress", response=begun)
        if self._call is not None:  # its item is sent when its name is known
            return said
        added = self._event("output_item.added", output_index=0, item=self._item("in_progress"))
        return said + added + self._event("content_part.added", **self._place, part=self._part())

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join(self._delta(*self.add(index, delta)) for index, delta in pieces)

    def _delta(self, new: str, logprobs: bytes) -> bytes:
        if self._call is not None:
            return self._begin_call() + self._event("function_call_arguments.delta", **self._place, delta=new) if new else b""
        written = orjson.Fragment(b"[%b]" % logprobs)
        return self._event("output_text.delta", **self._place, delta=new, logprobs=written) if new or logprobs else b""

    def closing(self) -> Iterator[bytes]:
        whole = self.ended()
        (item,) = whole["output"]
        if self._call is not None:
            yield self._begin_call()
            told = {"name": self._call.name or "", "arguments": self._call.arguments}
            yield self._event("function_call_arguments.done", **self._place, **told)
        else:
            yield from self._event_pieces("output_text.done", **self._place, text=self._text, logprobs=self._logprobs)
            yield from self._event_pieces("content_part.done", **self._place, part=self._part())
        yield from self._event_pieces("output_item.done", output_index=0, item=item)
        yield from self._event_pieces(self._status, response=whole)

    def failure(self, error: ServiceError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
        output = [self._item("incomplete")] if self._text else []
        return self._event("failed", response=self._response("failed", output=output, error={"code": code, "message": error.message}))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, **({"content_index": 0} if self._call is None else {})}

    def _begin_call(self) -> bytes:
        """Return the event that begins the tool call, or no bytes if it was sent before."""
        if self._begun:
            return b""
        self._begun = True
        return self._event("output_item.added", output_index=0, item={**self._item("in_progress"), "arguments": ""})

    def _event(self, kind: str, **content: Any) -> bytes:
        return sse.event(self._numbered(kind, content), f"response.{kind}")

    def _event_pieces(self, kind: str, **content: Any) -> Iterator[bytes]:
        return sse.event_pieces(self._numbered(kind, content), f"response.{kind}")

    def _numbered(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{kind}", "sequence_number": number, **content}
