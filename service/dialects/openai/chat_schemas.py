"""The bodies of requests to `/v1/chat/completions`, and the answers to them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from service.dialects.generation_schemas import (
    EMPTY_IS_ABSENT,
    MAX_TOKENS,
    OPENAI_IGNORED,
    SAMPLING,
    SAMPLING_IGNORED,
    ChatLogprob,
    FinishReason,
    GenerationRequestBody,
    GenerationUsage,
    Ignored,
    KeptState,
    PromptLogprobs,
    ResponseFormat,
    StopReason,
)
from service.dialects.openai.tool_calls import AllowedTools, Function, FunctionType, NamedTool
from service.http.fields import EMPTY, WITHOUT_NULLS, Fields, unsupported_fields
from service.http.routing import Many

Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16, description="Accepted and ignored."), WITHOUT_NULLS
]

_MOST_PARTS = 1024
_PART_IGNORED = frozenset(("cache_control",))


class ContentPart(Fields):
    ignored = _PART_IGNORED

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
    ignored = _PART_IGNORED | {"annotations"}
    unsupported = unsupported_fields("audio function_call reasoning")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = Field(None, description="Only an assistant's message with tool calls may have none.")
    name: str | None = Field(None, max_length=256)
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="An assistant's earlier reasoning, for chat templates that show it.")
    tool_calls: list[ToolCall] = Field([], max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)


class Tool(FunctionType):
    function: Function


class ChatRequest(GenerationRequestBody):
    ignored = SAMPLING_IGNORED | OPENAI_IGNORED | {"include_reasoning", "prediction"}
    unsupported = unsupported_fields(
        SAMPLING,
        "moderation echo audio functions chat_template chat_template_kwargs continue_final_message add_special_tokens documents suffix",
        best_of=(EMPTY, 1),
        reasoning_effort=(EMPTY, "none"),
        verbosity=(EMPTY, "low", "medium", "high"),
        web_search_options=(),
        function_call=(EMPTY, "none", "auto"),
        add_generation_prompt=(True,),
    )

    messages: Many[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: StrictInt | None = Field(
        None, ge=0, le=MAX_TOKENS, description="The service's `default_max_tokens` without it. 0 only with `store_state`."
    )
    max_tokens: StrictInt | None = Field(None, ge=0, le=MAX_TOKENS, description="The same under its old name; the other one counts.")
    logprobs: StrictBool = Field(False, description="The log-probability of each token.")
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="And of so many likeliest ones; needs `logprobs`.")
    response_format: Annotated[ResponseFormat | None, EMPTY_IS_ABSENT] = None
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = Field(
        "auto",
        description="none hides the tools from the model, auto shows them to it; required, or a tool's name, has one called; "
        "allowed_tools is auto or required for some of them.",
    )
    parallel_tool_calls: StrictBool | None = Field(
        None, description="false: of the calls that the model writes, only the first counts. A required call is always one."
    )
    store: StrictBool = Field(
        False, description="Accepted and ignored: no chat answer is stored. `store_state` keeps its state, /v1/responses the answer."
    )
    modalities: list[Literal["text"]] | None = Field(None, max_length=1)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted and ignored.")
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @field_validator("messages", mode="before")
    @classmethod
    def _not_too_many(cls, messages: Any) -> Any:
        """Raise an error if all messages together have more than `_MOST_PARTS` parts and tool calls. Validation blocks the event loop."""
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
    tool_calls: list[ToolCall] | None = Field(None, description="Only if `tool_choice` demands a call or the model writes one.")


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: StopReason
    state: KeptState | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: GenerationUsage
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Only where the request asked for them.")
    state: KeptState | None = Field(None, description="That of the only choice.")
    warnings: list[str] | None = Field(None, description="Only if a text exceeds the model's window; in a stream, with the last piece.")
