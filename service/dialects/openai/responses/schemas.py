"""The bodies and answers of `/v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, StrictBool, StrictInt, Tag, TypeAdapter

from service.dialects.states.options import Metadata, StateFields
from service.dialects.states.schemas import Page
from service.dialects.text.schemas import (
    EMPTY_IS_ABSENT,
    MAX_TOKENS,
    OPENAI_IGNORED,
    PADDED,
    SAMPLING,
    SAMPLING_IGNORED,
    ChatLogprob,
    Function,
    FunctionName,
    FunctionType,
    Ignored,
    KeptState,
    SamplingFields,
    TextFormat,
)
from service.http.fields import EMPTY, Fields, unsupported_fields
from service.http.routing import Many

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
    """Return the tag by which Pydantic chooses an item's class. Tags contain a hyphen, so that errors can omit them from field names."""
    type_ = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return {"function_call": "a-call", "function_call_output": "an-output"}.get(type_ if isinstance(type_, str) else "", "a-message")


Item = Annotated[
    Annotated[InputItem, Tag("a-message")] | Annotated[CallItem, Tag("a-call")] | Annotated[CallOutputItem, Tag("an-output")],
    Discriminator(_kind),
]


ITEMS: TypeAdapter[list[InputItem | CallItem | CallOutputItem]] = TypeAdapter(list[Item])


class ConversationReference(Fields):
    id: str = Field(min_length=1, max_length=256)


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
    include_obfuscation: StrictBool = Field(False, description=PADDED)


class ResponseRequest(SamplingFields, StateFields):
    ignored = SAMPLING_IGNORED | OPENAI_IGNORED | {"max_tool_calls"}
    unsupported = unsupported_fields(
        SAMPLING,
        "moderation echo prompt context_management background_options image access_programs prompt_logprobs",
        reasoning=(EMPTY, {"effort": "none"}),
        n=(EMPTY, 1),
    )

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
    store: StrictBool = Field(True, description="Keep the response, and the state after its last token.")
    previous_response_id: str | None = Field(
        None, max_length=256, description="The response that `input` continues. What it has seen is not computed again."
    )
    conversation: Annotated[str, Field(min_length=1, max_length=256)] | ConversationReference | None = Field(
        None, description="The conversation that `input` continues. Input and output are added to it when the response has ended."
    )
    background: StrictBool = Field(False, description="Answer at once, and generate on without the client. Needs `store`.")
    truncation: Literal["disabled", "auto"] = Field("disabled", description="Nothing is cut, with auto neither.")
    tools: list[FunctionTool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions = Field(
        "auto",
        description="none hides the tools from the model, auto shows them to it; required, or a tool's name, has one called; "
        "allowed_tools is auto or required for some of them.",
    )
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: of the calls that the model writes, only the first counts. A required call is always one."
    )
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted and ignored.")
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation

    @property
    def padded(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation


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


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None
    store: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions
    tools: list[FunctionTool]
    truncation: Literal["disabled"]
    background: bool
    usage: ResponseUsage | None
    state: KeptState | None = Field(None, description="The state after the last token, if it was kept. Only when the response has ended.")
    warnings: list[str] | None = Field(
        None, description="Only if the conversation exceeds the model's window, when the response has ended."
    )


class InputItemContent(BaseModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="Only of output_text.")
    logprobs: list[Any] | None = Field(None, description="Only of output_text; they are kept with the response alone.")


class ListedItem(BaseModel):
    """An item of an input or a conversation. It has the fields of its type."""

    id: str
    type: Literal["message", "function_call", "function_call_output"]
    status: Literal["completed", "incomplete"]
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: list[InputItemContent] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ItemList(Page[ListedItem]): ...


class InputTokenCount(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: StrictBool
