"""The bodies of requests to `/v1/completions`, and the answers to them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StrictBool, StrictInt

from service.dialects.generation_schemas import (
    MAX_TOKENS,
    OPENAI_IGNORED,
    SAMPLING,
    SAMPLING_IGNORED,
    FinishReason,
    GenerationRequestBody,
    GenerationUsage,
    KeptState,
    PromptLogprobs,
    StopReason,
    TokenId,
)
from service.http.fields import EMPTY, unsupported_fields
from service.http.routing import Many

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


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AttentionMatrix(BaseModel):
    source: list[str] = Field(description="The prompt's tokens: the columns.")
    tokens: list[str] = Field(description="The tokens that were written, the end included: the rows.")
    weights: list[list[float]] = Field(description="A row sums to 1.")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None
    state: KeptState | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")
    attention: AttentionMatrix | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage
    state: KeptState | None = Field(None, description="That of the only choice.")
    warnings: list[str] | None = Field(None, description="Only if a text exceeds the model's window; in a stream, with the last piece.")
