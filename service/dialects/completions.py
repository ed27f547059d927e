"""OpenAI: `/v1/completions`, text continued.

Beyond it, with vLLM's names: the sampling fields of `SamplingFields`, `prompt_logprobs`, `stop_reason`. Offsets count from the beginning of
the text that is sent, as in vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, StrictBool, StrictInt

from service import sse
from service.catalog import Catalog
from service.dialects import generation, writings
from service.dialects.chunks import Chunks
from service.dialects.completion_logprobs import Logprobs
from service.dialects.generation_schemas import (
    MAX_TOKENS,
    STREAM,
    FinishReason,
    GenerationRequestBody,
    GenerationUsage,
    PromptLogprobs,
    StopReason,
    TokenId,
)
from service.dialects.openai import ERRORS
from service.dialects.runs import Generator, Runs
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.request import Delta, TokenLogprob
from service.routing import CallDep, CatalogDep, JsonRoute, Many

MOST_RUNS = 256  # choices of all prompts of a request together
_PROMPTS = 128


class CompletionRequest(GenerationRequestBody):
    prompt: (
        str
        | Annotated[Many[str], Field(min_length=1, max_length=_PROMPTS)]
        | Annotated[Many[TokenId], Field(min_length=1)]
        | Annotated[Many[Annotated[Many[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=_PROMPTS)]
    ) = Field(description="A text, texts, token ids, or lists of token ids.")
    max_tokens: StrictInt = Field(16, ge=0, le=MAX_TOKENS, description="0 only with `echo`: the prompt and its log-probabilities.")
    best_of: StrictInt | None = Field(None, ge=1, le=128, description="Only what `n` says.")
    echo: StrictBool = Field(False, description="The prompt comes back before its completion.")
    suffix: str | None = Field(None, description="Refused: no model here fills in the middle.")
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
    attention: AttentionMatrix | None = Field(None, description="Only where the request asked for it; in a stream, with the last piece.")


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: GenerationUsage


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/completions", response_model=Completion, responses=STREAM)
async def completions(body: CompletionRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Each prompt continued, n times. With `stream`, a chunk for what has come since the last one."""
    if (writer := catalog.writer(body.model)) is not None:
        sources = [ids for _, ids in await _prompts(body, writer, catalog)]
        return await writings.complete(body, sources, writer, call, catalog, most_runs=MOST_RUNS)
    model = catalog.generator(body.model)
    _check(body)
    prompts = await _prompts(body, model, catalog)
    if len(prompts) * body.n > MOST_RUNS:
        raise BatchTooLarge(f"{len(prompts)} prompts with n={body.n} are more than {MOST_RUNS} completions: send them in parts", param="n")
    asked = generation.requests(
        body,
        [ids for _, ids in prompts],
        model,
        call,
        n=body.n,
        max_tokens=body.max_tokens,
        max_tokens_field="max_tokens",
        grammar=generation.grammar_of(body),
        top_logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="prompt")
    answer = _Answer(body, model, [prompt for prompt in prompts for _ in range(body.n)], runs)
    if body.stream:
        return await sse.stream(runs, answer, call, catalog.settings)
    choices = [answer.choice(index, delta) for index, delta in enumerate(await runs.all())]
    return {**answer.head, "choices": choices, "usage": generation.usage_of(runs)}


def _check(body: CompletionRequest) -> None:
    """What a schema does not say: fields that depend on each other."""
    for name in ("num_beams", "attention"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is for encoder-decoders, and this model is a decoder: leave it out", param=name)
    if body.suffix is not None:
        raise InvalidRequest("suffix is not supported: no model here fills in the middle", param="suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest(f"best_of={body.best_of} is not supported: leave it out or send n={body.n}", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens=0 needs echo=true: there would be nothing to answer", param="max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false", param="prompt_logprobs")
    if body.prompt_logprobs is not None and body.echo and body.logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with echo and logprobs, which give the same", param="prompt_logprobs")
    generation.check_streaming(body.stream, body.stream_options)


async def _prompts(body: CompletionRequest, model: Generator, catalog: Catalog) -> list[tuple[str, list[int]]]:
    """Each prompt as text and ids; the text only where it comes back."""
    if isinstance(body.prompt, str):
        given: list[Any] = [body.prompt]
    elif isinstance(body.prompt[0], int):
        given = [body.prompt]
    else:
        given = body.prompt
    prompts: list[tuple[str, list[int]]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, await generation.encode(model, catalog, prompt, "prompt")))
        else:
            generation.check_ids(prompt, model.manifest.limits.vocab_size, "prompt")
            prompts.append((model.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens) if body.echo else "", prompt))
    return prompts


@dataclass
class _Sent:
    """What has left of one choice."""

    logprobs: Logprobs
    begun: bool = False


class _Answer(Chunks):
    """Choices from deltas; also the script of the stream."""

    def __init__(self, body: CompletionRequest, model: Generator, prompts: Sequence[tuple[str, list[int]]], runs: Runs) -> None:
        self._body, self._prompts = body, prompts
        self._sent = [_Sent(Logprobs(model, skip_special_tokens=body.skip_special_tokens)) for _ in prompts]
        super().__init__(model, runs, body.stream_options, id_prefix="cmpl-", object_="text_completion")

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """What this delta adds to the choice; to the first one belongs the echo of the prompt."""
        sent, text = self._sent[index], delta.text
        logprobs: list[tuple[int, TokenLogprob | None]] = [(each.token_id, each) for each in delta.logprobs]
        first, sent.begun = not sent.begun, True
        run = self.runs.runs[index]
        if first and self._body.echo:
            echo, ids = self._prompts[index]
            text = echo + text
            if self._body.logprobs is not None:
                logprobs = [*zip(ids, run.prompt_logprobs, strict=True), *logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else sent.logprobs.of(logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = generation.prompt_logprobs(run.prompt_logprobs, self.model)
        return choice

    # As a stream -----------------------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        return b""

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join(self.chunk([self.choice(index, delta)]) for index, delta in pieces if generation.worth_sending(delta))
