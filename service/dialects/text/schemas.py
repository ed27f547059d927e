"""The bodies of requests for text to OpenAI's routes, and the answers of completions and chat. The bodies of responses are in
`../openai/responses/schemas.py`.

Source: the OpenAI API reference (CreateCompletion, CreateChatCompletion, CreateResponse) and the types of openai-python.
Additional fields have vLLM's names and ranges. Types are strict: `"5"` is not an integer, and `true` is not a number. A null is
the same as an absent field. An unknown field is an error, since clients would not notice that it has no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from service.dialects.states.options import StateFields
from service.http.fields import EMPTY, WITHOUT_NULLS, Fields, Unsupported, unsupported_fields
from service.http.routing import Many

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Ignored = Annotated[str | None, Field(max_length=512, description="Accepted and ignored.")]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Source = Annotated[str, Field(max_length=65_536)]
Choices = Annotated[list[StopString], Field(max_length=1024)]
MAX_TOKENS = 1_000_000
EMPTY_IS_ABSENT = BeforeValidator(lambda value: None if value == {} else value)

# vLLM's extra parameters of each of its routes, and of those that sample.
VLLM_IGNORED = frozenset(("request_id",))
VLLM: Unsupported = unsupported_fields("priority mm_processor_kwargs kv_transfer_params vllm_xargs")
SAMPLING_IGNORED = VLLM_IGNORED | {"spaces_between_special_tokens", "guided_decoding_backend"}
SAMPLING: Unsupported = unsupported_fields(
    VLLM,
    "truncate_prompt_tokens use_beam_search bad_words logits_processors return_tokens_as_token_ids "
    "return_token_ids guided_whitespace_pattern structural_tag prompt_embeds repetition_detection "
    "thinking_token_budget",
    length_penalty=(EMPTY, 1),
    detokenize=(True,),
)
OPENAI_IGNORED = frozenset(("prompt_cache_retention", "prompt_cache_options"))


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`, which contains at most one constraint on the text."""

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: Source | None = None
    grammar: Source | None = Field(None, description="A grammar in Lark's syntax.")
    choice: Choices | None = Field(None, description="The completion is one of these.")
    json_object: StrictBool | None = None


class DrawingFields(Fields):
    """The fields that control how a token is sampled."""

    temperature: StrictFloat = Field(1.0, ge=0, le=2, description="0: always the likeliest token.")
    top_p: StrictFloat = Field(1.0, ge=0, le=1)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same tokens under any load.")
    top_k: StrictInt = Field(0, ge=-1, lt=2**31, description="0 and -1: all tokens.")
    min_p: StrictFloat = Field(0.0, ge=0, le=1)
    typical_p: StrictFloat = Field(1.0, gt=0, le=1)


class SamplingFields(DrawingFields):
    """The fields that control how tokens are sampled, and when generation ends."""

    frequency_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    presence_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[StrictFloat, Field(ge=-100, le=100)]], WITHOUT_NULLS] = Field(
        {}, max_length=1024, description="By token id."
    )
    stop: Annotated[str, Field(max_length=1024)] | Annotated[list[StopString], Field(max_length=4)] = Field(
        [], description="Up to 4 texts that end the completion."
    )

    repetition_penalty: StrictFloat = Field(1.0, gt=0, le=100)
    min_tokens: StrictInt = Field(0, ge=0, le=MAX_TOKENS)
    ignore_eos: StrictBool = False
    stop_token_ids: Many[TokenId] = Field([], max_length=128)
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    cache_salt: Annotated[str, Field(max_length=256)] = Field("", description="Share cached prompts only with requests of this salt.")
    allowed_token_ids: Many[TokenId] = Field([], max_length=65_536, description="Only these tokens are sampled; empty: all.")
    guided_json: str | dict[str, Any] | None = Field(None, description="A JSON schema that the completion satisfies.")
    guided_regex: Source | None = Field(None, description="A regular expression that the whole completion matches; empty: none.")
    guided_grammar: Source | None = Field(None, description="A grammar in Lark's syntax that the completion belongs to; empty: none.")
    guided_choice: Choices | None = Field(None, description="The completion is one of these; empty: any.")
    structured_outputs: StructuredOutputs | None = None


PADDED = "Fill events up to multiples of 64 bytes, so that their sizes do not tell who watches the connection how long each text is."


class StreamOptions(Fields):
    include_usage: StrictBool = Field(False, description="Send the usage in one more chunk at the end, without choices.")
    continuous_usage_stats: StrictBool = Field(False, description="With `include_usage`: every chunk has the usage so far.")
    include_obfuscation: StrictBool = Field(False, description=PADDED)


class GenerationRequestBody(SamplingFields, StateFields):
    """The fields that completions and chat have in addition to `SamplingFields`."""

    model: str | None = Field(None, max_length=256, description="Name or alias of a served model. Default: the first decoder.")
    n: StrictInt = Field(1, ge=1, le=128, description="Choices for each prompt.")
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="Log-probabilities of the prompt's tokens.")
    durability: Literal["turn", "checkpoint", "none"] = Field(
        "checkpoint",
        description="Of a stream: turn stores it before the first byte, so that it can be continued after a crash; checkpoint stores it "
        "while its prompt is read, within 50 ms or later; none does not store it. docs/states.md has what each crash takes.",
    )
    user: Ignored = None


class JsonSchema(Fields):
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool = Field(True, description="Always true in effect.")
    description: str | None = Field(None, max_length=4096)


class ResponseFormat(Fields):
    """The field `response_format` of a chat request, in OpenAI's form (`json_schema`) or text-generation-inference's (`value`)."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    value: str | dict[str, Any] | None = Field(
        None, description="As huggingface_hub sends it: a JSON schema; with the type regex, a regular expression."
    )


class TextFormat(Fields):
    """The field `text.format` of a responses request. Unlike chat's `response_format`, it has the schema's fields at the top level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool = Field(True, description="Always true in effect.")
    description: str | None = Field(None, max_length=4096)


STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, its pieces as server-sent events.", "content": {"text/event-stream": {}}}
}


# Tools -----------------------------------------------------------------------------------------------------------------------------------


class FunctionType(Fields):
    """The base class of objects whose `type` is `function`."""

    type: Literal["function"]


class FunctionName(Fields):
    name: str


class Function(Fields):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = Field(None, max_length=65_536)
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedTool(FunctionType):
    """A reference to one tool, in chat's format. In the format of responses, the name is beside `type`."""

    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class Allowed(Fields):
    """The tools that may be called. With mode `auto` they are only shown to the model; with `required` it must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedTools(Fields):
    """A `tool_choice` of some of the tools, in chat's format. In the format of responses, `mode` and `tools` are beside `type`."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed

    @property
    def mode(self) -> str:
        return self.allowed_tools.mode

    @property
    def tools(self) -> list[NamedTool]:
        return self.allowed_tools.tools


# Completions -----------------------------------------------------------------------------------------------------------------------------


_PROMPTS = 128


class CompletionRequest(GenerationRequestBody):
    ignored = SAMPLING_IGNORED | OPENAI_IGNORED | {"safety_identifier", "prompt_cache_key", "metadata"}
    unsupported = unsupported_fields(
        SAMPLING,
        "moderation store suffix",
        service_tier=(EMPTY, "auto", "default"),
        add_special_tokens=(True,),
        response_format=(EMPTY, {"type": "text"}),
    )

    prompt: (
        str
        | Annotated[Many[str], Field(min_length=1, max_length=_PROMPTS)]
        | Annotated[Many[TokenId], Field(min_length=1)]
        | Annotated[Many[Annotated[Many[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=_PROMPTS)]
    ) = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: StrictInt = Field(16, ge=0, le=MAX_TOKENS, description="0 only with `echo` or `store_state`: nothing is generated.")
    best_of: StrictInt | None = Field(None, ge=1, le=128, description="Only what `n` says.")
    echo: StrictBool = Field(False, description="The prompt comes back before its completion.")
    logprobs: StrictInt | None = Field(None, ge=0, le=5, description="Log-probabilities of each token and of so many likeliest ones.")
    num_beams: StrictInt | None = Field(None, ge=1, le=8, description="Encoder-decoders: outputs followed side by side; `n` without it.")
    attention: StrictBool = Field(False, description="Encoder-decoders: what of the prompt each token was written from.")


# Chat ------------------------------------------------------------------------------------------------------------------------------------


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


# Answers ---------------------------------------------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class GenerationUsage(BaseModel):
    """The token counts of a request. The tokens of a prompt are counted once for all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KeptState(BaseModel):
    """The stored state of a model after a generated text. `GET /v1/states/ID` returns all of its fields."""

    object: Literal["state"]
    id: str
    parent: str | None
    name: str | None
    expires: int | None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] = Field(description="The token's UTF-8, which may be a part of a character.")


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length"]
StopReason = Annotated[str | int | None, Field(description="The stop string or token id that was reached; null if there was none.")]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AttentionMatrix(BaseModel):
    source: list[str] = Field(description="The prompt's tokens: the columns.")
    tokens: list[str] = Field(description="The tokens that were written, the end included: the rows.")
    weights: list[list[float]] = Field(description="A row sums to 1.")


class _Choice(BaseModel):
    """The fields of a choice that completions and chat share."""

    index: int
    stop_reason: StopReason
    state: KeptState | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")


class _Generated(BaseModel):
    """The fields of an answer that completions and chat share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: GenerationUsage
    state: KeptState | None = Field(None, description="That of the only choice.")
    warnings: list[str] | None = Field(None, description="Only if a text exceeds the model's window; in a stream, with the last piece.")


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None
    attention: AttentionMatrix | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")


class Completion(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="Null where a tool is called.")
    refusal: None
    annotations: list[Any]
    tool_calls: list[ToolCall] | None = Field(None, description="Only if `tool_choice` demands a call or the model writes one.")


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Only where the request asked for them.")
