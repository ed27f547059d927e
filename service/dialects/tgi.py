"""Routes of text-generation-inference (TGI): `/generate` and `/generate_stream`. `POST /` with a decoder answers in the same
format.

The format follows TGI's router code (GenerateRequest, GenerateParameters, StreamResponse, InferError) and huggingface_hub's
text_generation. As in TGI, decoding is greedy unless `do_sample` is true or a sampling field such as `temperature` has a value with
an effect. The default is 100 tokens, and a stop text that ends the generation is part of the answer.
"""

import codecs
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from service.call import Call
from service.catalog import Catalog
from service.dialects.text.answer import AnswerSize, check_size, most_tokens, sequence_tokens, token_text, window_warnings
from service.dialects.text.grammars import value_grammar
from service.dialects.text.logprobs import finite
from service.dialects.text.pipeline import sent
from service.dialects.text.request import TextCall
from service.dialects.text.schemas import MAX_TOKENS, STREAM, SamplingFields
from service.errors import DeadlineExceeded, EmptyInput, InvalidRequest, NotReady, Overloaded, RuntimeFailed, ServiceError, WrongKind
from service.generation.model import Generator
from service.generation.request import Delta, TokenLogprob
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import Elements, Text, done, whole
from service.http.dialect import Dialect
from service.http.fields import EMPTY, Body, unsupported_fields
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.settings import Settings

ErrorType = Literal["validation", "generation", "overloaded", "incomplete_generation", "healthcheck"]
FinishReason = Literal["length", "eos_token", "stop_sequence"]
_NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "typical_p": 1}  # any other value of these fields implies `do_sample`
_SAMPLING = (*_NEUTRAL, "repetition_penalty", "frequency_penalty")
_MOST_CHARACTER = 6  # limit on the bytes of one character in JSON


class TgiGrammar(Body, strict=True):
    type: Literal["json", "json_object", "json_schema", "regex"]
    value: str | dict[str, Any] = Field(description="A JSON schema, or a regular expression.")


class TgiParameters(Body, strict=True, allow_inf_nan=False):
    """The field `parameters` of a request. As in TGI, types are strict."""

    unsupported = unsupported_fields("adapter_id watermark", best_of=(EMPTY, 1))

    do_sample: bool = Field(False, description="Draw tokens. Without it the likeliest are taken, unless a field below says how to draw.")
    temperature: float | None = Field(None, gt=0, le=2)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    max_new_tokens: int = Field(100, ge=1, le=MAX_TOKENS)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    stop: list[str] = Field([], max_length=4, description="Texts that end the generation; they belong to it.")
    truncate: int | None = Field(None, ge=0, lt=2**31, description="Keep this many of the prompt's last tokens.")
    return_full_text: bool = Field(False, description="The prompt comes back before its continuation.")
    grammar: TgiGrammar | None = None
    details: bool = Field(False, description="Tokens, their log-probabilities, and why it ended.")
    decoder_input_details: bool = Field(False, description="The prompt's too; needs `details`.")
    top_n_tokens: int | None = Field(None, ge=0, le=20, description="The likeliest tokens in each place; needs `details`.")


class TgiRequest(Body, strict=True):
    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first decoder without it.")
    inputs: str = Field(examples=["def mean(values):"])
    parameters: TgiParameters | None = None
    stream: bool = Field(False, description="At `/` and `/invocations`: answer as /generate_stream does.")


class TgiToken(BaseModel):
    id: int
    text: str
    logprob: float | None
    special: bool | None = None


class TgiDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[TgiToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | None = None


class TgiAnswer(BaseModel):
    generated_text: str
    details: TgiDetails | None = Field(None, description="Only where the request asked for them.")
    warnings: list[str] | None = Field(None, description="Only if a text exceeds the model's window; in a stream, with the last token.")


class TgiError(BaseModel):
    error: str
    error_type: ErrorType


_ERROR_TYPES: tuple[tuple[type[ServiceError], ErrorType], ...] = (
    (Overloaded, "overloaded"),
    (NotReady, "healthcheck"),
    (WrongKind, "generation"),
    (RuntimeFailed, "generation"),
    (DeadlineExceeded, "incomplete_generation"),
)


def render(error: ServiceError) -> tuple[int, Any]:
    rest: ErrorType = "validation" if error.status < 500 else "incomplete_generation"
    kind = next((name for known, name in _ERROR_TYPES if isinstance(error, known)), rest)
    status = 422 if isinstance(error, InvalidRequest) else 424 if isinstance(error, RuntimeFailed) else error.status
    return status, {"error": error.message, "error_type": kind}


DIALECT = Dialect("tgi", ("/generate", "/generate_stream"), render)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": TgiError} for status in (401, 404, 413, 422, 424, 429, 500, 503, 504)}
router = APIRouter(route_class=JsonRoute, tags=["text-generation-inference"], responses=ERRORS)


@router.post("/generate", response_model=TgiAnswer, response_model_exclude_none=True)
async def generate(body: TgiRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the continuation of the prompt in one answer."""
    return await continuation(body, call, catalog, stream=False)


@router.post("/generate_stream", response_class=Response, responses=STREAM)
async def generate_stream(body: TgiRequest, call: CallDep, catalog: CatalogDep) -> Response:
    """Stream the continuation of the prompt, one event per token. The last event also has the whole text."""
    return await continuation(body, call, catalog, stream=True)


async def continuation(body: TgiRequest, call: Call, catalog: Catalog, *, stream: bool, listed: bool = False) -> Response:
    """Return the answer to a request. `listed`: a whole answer is the only element of a list."""
    asked = body.parameters or TgiParameters.model_validate({})
    if stream and asked.decoder_input_details:
        raise InvalidRequest("decoder_input_details cannot be streamed: use /generate", param="parameters.decoder_input_details")
    text = TextCall.of(body.model, None, call, catalog)
    if not body.inputs:
        raise EmptyInput("`inputs` cannot be empty", param="inputs")
    prompt = await text.text(body.inputs, "inputs")
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
    draws = asked.do_sample or any(given.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    sampling = SamplingFields(
        **{"temperature": 1.0, **given} if draws else {**given, "temperature": 0.0},
        seed=seed,
        stop=[stop for stop in asked.stop if stop],
        include_stop_str_in_output=True,
    )
    requests = text.requests(
        sampling,
        [prompt[-asked.truncate :] if asked.truncate else prompt],
        max_tokens=asked.max_new_tokens,
        max_tokens_field="max_new_tokens",
        grammar=None if (form := asked.grammar) is None else value_grammar(form.type, form.value, "parameters.grammar"),
        top_logprobs=asked.top_n_tokens or 0,
        prompt_logprobs=0 if asked.details and asked.decoder_input_details else None,
    )
    if not stream:
        _check_size(body, asked, len(prompt), text.model, catalog.settings)
    runs = await text.submit(requests, prompt_field="inputs", stream=stream)
    answer = _TgiAnswer(body, asked, text.model, runs, seed if draws else None, listed=listed)
    return await sent(answer, call, catalog.settings, stream=stream)


def _check_size(body: TgiRequest, asked: TgiParameters, prompt_tokens: int, model: Generator, settings: Settings) -> None:
    """Raise NeverFits if the answer could be larger than `max_answer_bytes`."""
    most = most_tokens(model, asked.max_new_tokens, prompt_tokens)
    size_of = AnswerSize(model.vocabulary)
    size = size_of.text(most) + (_MOST_CHARACTER * len(body.inputs) if asked.return_full_text else 0)
    if asked.details:
        size += size_of.tgi_tokens(most, asked.top_n_tokens or 0)
        size += size_of.tgi_tokens(prompt_tokens, 0) if asked.decoder_input_details else 0
    check_size(size, 1, settings, fields={"max_new_tokens": True, "top_n_tokens": asked.details}, streamable=False)


class _TgiAnswer(sse.Script[tuple[int, Delta]]):
    """Builds the answer to one request, either as one JSON object (`whole`) or as the events of a stream."""

    def __init__(self, body: TgiRequest, asked: TgiParameters, model: Generator, runs: Runs, seed: int | None, *, listed: bool) -> None:
        self._asked, self._model, self.runs, self._seed, self._listed = asked, model, runs, seed, listed
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = body.inputs if asked.return_full_text else ""
        self._n = 0  # number of tokens sent so far
        self._written, self._tokens, self._tops, self._last = Text(), Elements(), Elements(), Delta("")  # of a whole answer

    async def whole(self) -> Any:
        self._written.add(self._text)
        await self.runs.read(self._add)
        answer: dict[str, Any] = {"generated_text": self._written, **self._warnings()}
        if self._asked.details:
            prefill = Elements()
            await done(map(prefill.add, self._prefill()))
            answer["details"] = {
                "finish_reason": _reason(self._last),
                "generated_tokens": self._n,
                "seed": self._seed,
                "prefill": prefill,
                "tokens": self._tokens,
            }
            if self._asked.top_n_tokens:
                answer["details"]["top_tokens"] = self._tops
        return [answer] if self._listed else answer

    def _add(self, _: int, delta: Delta) -> None:
        self._written.add(delta.text)
        self._last = delta
        self._n += len(delta.token_ids)
        if self._asked.details:
            self._tokens.add(b",".join(whole(self._token(token_id, each)) for token_id, each in _told(delta)))
            if self._asked.top_n_tokens:
                self._tops.add(b",".join(whole(self._top(each)) for each in delta.logprobs))

    def _prefill(self) -> Iterator[bytes]:
        """Yield the tokens of the prompt as JSON objects with their log-probabilities."""
        run = self.runs.runs[0]
        for token_id, each in zip(run.request.prompt, run.prompt_logprobs, strict=False):
            text = token_text(token_id, self._model)
            yield whole({"id": token_id, "text": text, "logprob": each and finite(each.logprob)})

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join(self._events(delta) for _, delta in pieces)

    def failure(self, error: ServiceError) -> bytes:
        return sse.event(render(error)[1])

    def _events(self, delta: Delta) -> bytes:
        self._text += delta.text
        events: list[dict[str, Any]] = []
        unfinished = {"generated_text": None, "details": None}
        for token_id, each in _told(delta):
            self._n += 1
            tops = {"top_tokens": [] if each is None else self._top(each)} if self._asked.top_n_tokens else {}
            events.append({"index": self._n, "token": self._token(token_id, each), **unfinished, **tops})
        if delta.finish_reason is not None:
            if not events:  # the run ended without a further token, but its end needs an event
                events.append({"index": self._n, "token": {"id": 0, "text": "", "logprob": 0.0, "special": True}, **unfinished})
            usage = self.runs.runs[0].usage
            ended = {"finish_reason": _reason(delta), "generated_tokens": self._n, "seed": self._seed, "input_length": usage.prompt_tokens}
            events[-1] |= {"generated_text": self._text, "details": ended, **self._warnings()}
        return b"".join(map(sse.event, events))

    def _warnings(self) -> dict[str, list[str]]:
        return window_warnings(self._model, sequence_tokens(self.runs.runs[0].request, self._n))

    def _token(self, token_id: int, each: TokenLogprob | None) -> dict[str, Any]:
        special = token_id in self._model.vocabulary.special
        text = token_text(token_id, self._model) if special else self._decoder.decode(self._model.vocabulary[token_id])
        return {"id": token_id, "text": text, "logprob": None if each is None else finite(each.logprob), "special": special}

    def _top(self, each: TokenLogprob) -> list[dict[str, Any]]:
        model = self._model
        return [
            {"id": at, "text": token_text(at, model), "logprob": finite(logprob), "special": at in model.vocabulary.special}
            for at, logprob in each.top
        ]


def _told(delta: Delta) -> list[tuple[int, TokenLogprob | None]]:
    """Return each token id of `delta` with its log-probability, or with None if it has no log-probability."""
    return list(zip(delta.token_ids, [*delta.logprobs, *[None] * (len(delta.token_ids) - len(delta.logprobs))], strict=True))


def _reason(delta: Delta) -> FinishReason:
    if delta.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"
