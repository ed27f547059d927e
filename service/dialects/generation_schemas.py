"""The fields of request bodies and answers that several of OpenAI's text routes share.

Source: the OpenAI API reference (CreateCompletion, CreateChatCompletion, CreateResponse) and the types of openai-python.
Additional fields have vLLM's names and ranges. Types are strict: `"5"` is not an integer, and `true` is not a number. A null is
the same as an absent field. An unknown field is an error, since clients would not notice that it has no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt

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


# Answers -------------------------------------------------------------------------------------------------------------------------------


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

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, its pieces as server-sent events.", "content": {"text/event-stream": {}}}
}
