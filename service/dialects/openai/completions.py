"""The route `/v1/completions` of OpenAI, which continues texts.

Additions, with vLLM's names: the sampling fields of `SamplingFields`, `prompt_logprobs`, `stop_reason`. As in vLLM, text offsets
count from the beginning of the returned text.

For an encoder-decoder, the prompt is the source text, and the generated text is the completion: the most likely output. It is found
greedily or, with `num_beams` or `n`, by a beam search that ranks outputs by the mean log-probability of their tokens. The `n` best outputs
of the beam are returned. `logprobs` adds the log-probabilities of each token and of the likeliest tokens in its position. `attention` adds
the attention weights from output tokens to source tokens. All other fields that would change the output are errors.
"""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Response

from service.dialects.openai.embeddings import ERRORS
from service.dialects.text.answer import AnswerSize, check_size, most_tokens, token_text
from service.dialects.text.chunks import Chunks
from service.dialects.text.grammars import grammar_of
from service.dialects.text.logprobs import Columns, Logprobs, slices
from service.dialects.text.pipeline import AnswerStart, Plan, TextRoute, sent
from service.dialects.text.request import TextCall, check_prompt_logprobs, check_streaming
from service.dialects.text.schemas import STREAM, Completion, CompletionRequest
from service.encoder_decoder.request import EncoderDecoderRequest
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.model import DecoderModel, Generator
from service.generation.request import Attention, Delta, Sampling
from service.generation.run import Run
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import Elements, Text, done
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.settings import Settings
from service.streams.source import Received

MOST_RUNS = 256  # maximum number of choices of a request, for all prompts together
MOST_WEIGHTS = 2**20  # maximum number of attention weights in an answer
# Fields that an encoder-decoder takes. The last two add details and do not change the output.
_TAKEN = {"model", "prompt", "max_tokens", "n", "num_beams", "stream", "stream_options", "user", "seed", "skip_special_tokens"}
_TAKEN |= {"logprobs", "attention"}

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/completions", response_model=Completion, responses=STREAM)
async def completions(body: CompletionRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Continue each prompt n times. With `stream`, each chunk contains the new text of a choice since the choice's previous chunk."""
    return await ROUTE.answer(body, call, catalog)


async def _plan(body: CompletionRequest, text: TextCall[DecoderModel]) -> Plan:
    _check(body)
    prompts = await _prompts(body, text)
    _check_runs(body, len(prompts))
    return Plan(
        prompts=[ids for _, ids in prompts],
        max_tokens=body.max_tokens,
        max_tokens_field="max_tokens",
        check_size=lambda _: _check_size(body, prompts, text.model, text.catalog.settings),
        answer=partial(_CompletionAnswer, body, text.model, prompts),
        grammar=grammar_of(body),
        top_logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )


def _check_size(body: CompletionRequest, prompts: Sequence[tuple[str, list[int]]], model: Generator, settings: Settings) -> None:
    """Raise NeverFits if the whole answer, or the echoed prompts at the beginning of a stream, could exceed `max_answer_bytes`."""
    size, total = AnswerSize(model.vocabulary), 0
    tokens = 0 if body.stream else most_tokens(model, body.max_tokens, min(len(ids) for _, ids in prompts))
    for text, ids in prompts:
        total += size.text(tokens) + size.completion_logprobs(tokens, body.logprobs) + size.prompt_logprobs(len(ids), body.prompt_logprobs)
        if body.echo:
            total += 6 * len(text) + size.completion_logprobs(len(ids), body.logprobs)
    fields = {"n": body.n > 1, "max_tokens": True, "logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs}
    check_size(-(-total // len(prompts)), len(prompts) * body.n, settings, fields=fields, streamable=not body.stream)


def _check(body: CompletionRequest) -> None:
    """Raise InvalidRequest if the fields violate a constraint that a schema cannot express."""
    for name in ("num_beams", "attention"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is for encoder-decoders, and this model is a decoder: leave it out", param=name)
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest(f"best_of={body.best_of} is not supported: leave it out or send n={body.n}", param="best_of")
    if body.max_tokens == 0 and not (body.echo or body.store_state):
        raise InvalidRequest("max_tokens=0 needs echo=true or store_state: there would be nothing to answer", param="max_tokens")
    if body.echo and body.state is not None:
        raise InvalidRequest("echo cannot be combined with state, which has no text: leave one of them out", param="echo")
    check_prompt_logprobs(body.prompt_logprobs, body.state, stream=body.stream)
    if body.prompt_logprobs is not None and body.echo and body.logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with echo and logprobs, which give the same", param="prompt_logprobs")
    check_streaming(body.stream, body.stream_options)


async def _prompts(body: CompletionRequest, text: TextCall[Any]) -> list[tuple[str, list[int]]]:
    """Return the text and the token ids of each prompt. If a prompt continues a state, tokens in the state are left out.

    The text of a prompt that was sent as ids is empty unless the request echoes prompts.
    """
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    given: list[Any] = [body.prompt] if single else list(body.prompt)
    prompts: list[tuple[str, list[int]]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, await text.text(prompt)))
        else:
            text.check_ids(prompt, "prompt")
            echoed = text.model.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
            prompts.append((echoed, prompt))
    return prompts


def _check_runs(body: CompletionRequest, prompts: int) -> None:
    if prompts * body.n > MOST_RUNS:
        raise BatchTooLarge(f"{prompts} prompts with n={body.n} are more than {MOST_RUNS} completions: send them in parts", param="n")


class CompletionChunks(Chunks):
    """Builds the chunks of a completion, for a decoder or an encoder-decoder."""

    def __init__(self, body: CompletionRequest, model: Generator, runs: Runs, start: AnswerStart) -> None:
        super().__init__(model, runs, body.stream_options, start, object_="text_completion")
        self.body = body
        self.logprobs = [self.new_logprobs() for _ in runs.runs]  # one object for each choice

    def new_logprobs(self) -> Logprobs:
        return Logprobs(self.model, skip_special_tokens=self.body.skip_special_tokens)

    async def skip(self, index: int, part: Received) -> None:
        if self.body.logprobs is not None:
            await done(self.logprobs[index].after(part.token_ids))

    def choice(self, index: int, delta: Delta, columns: Columns | None = None) -> dict[str, Any]:
        """Return the JSON that a delta adds to a choice. If `columns` is given, it is sent in place of the delta's log-probabilities."""
        if columns is None and self.body.logprobs is not None:
            self.logprobs[index].add_to(columns := Columns(self.tokens), delta.logprobs)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if self.body.logprobs is None or columns is None else columns.json(),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self.state(index, delta),
        }


class _CompletionAnswer(CompletionChunks):
    """Builds the answer of a decoder.

    The log-probabilities of an echoed prompt are read from the run of its first choice.
    """

    def __init__(
        self, body: CompletionRequest, model: Generator, prompts: Sequence[tuple[str, list[int]]], runs: Runs, start: AnswerStart
    ) -> None:
        super().__init__(body, model, runs, start)
        self._prompts = prompts
        self._echoed_logprobs = body.echo and body.logprobs is not None
        # Indices of the streamed choices that have begun: their echoed prompt was sent.
        self._begun = {index for index, place in enumerate(self.places) if not place.untouched}
        self._held: dict[int, list[tuple[int, Delta]]] = {}  # prompt index -> deltas that wait for the prompt's log-probabilities

    # As a whole ----------------------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        body, texts = self.body, [Text() for _ in self.runs.runs]

        def echo() -> Iterator[bytes]:
            for index, text in enumerate(texts):
                prompt, ids = self._prompts[index // body.n]
                text.add(prompt)
                yield from self.logprobs[index].after(ids) if self._echoed_logprobs else (b"",)

        try:
            await done(echo() if body.echo else ())
        except BaseException:
            self.runs.close()
            raise
        all_columns, last = [Columns(self.tokens) for _ in texts], [Delta("")] * len(texts)

        def add(index: int, delta: Delta) -> None:
            texts[index].add(delta.text)
            if body.logprobs is not None:
                self.logprobs[index].add_to(all_columns[index], delta.logprobs)
            last[index] = delta

        await self.runs.read(add)
        choices = []
        for at, (_, ids) in enumerate(self._prompts):
            told = self.runs.runs[at * body.n].prompt_logprobs
            echoed, of_prompt = Columns(self.tokens), Elements()
            if self._echoed_logprobs:
                await done(self.new_logprobs().prompt(echoed, ids, told))
            elif body.prompt_logprobs is not None:
                await done(map(of_prompt.add, map(self.tokens.prompt, slices(told))))
            for index in range(at * body.n, (at + 1) * body.n):
                columns = Columns(self.tokens)
                columns.add_all(echoed)
                columns.add_all(all_columns[index])
                choice = {**self.choice(index, last[index], columns), "text": texts[index]}
                choices.append(choice if body.prompt_logprobs is None else {**choice, "prompt_logprobs": of_prompt})
        return self.answer(choices)

    # As a stream -----------------------------------------------------------------------------------------------------------------------

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> sse.Written:
        if self.body.echo and not all(index in self._begun for index, _ in pieces):
            return self._after_echo(pieces)
        return super().pieces(pieces)

    async def skip(self, index: int, part: Received) -> None:
        if self._echoed_logprobs and not part.place.untouched:
            await done(self.logprobs[index].after(self._prompts[index // self.body.n][1]))
        await super().skip(index, part)

    def _after_echo(self, pieces: Sequence[tuple[int, Delta]]) -> Iterator[bytes]:
        """Yield the chunks of the deltas `pieces`, with the echoed prompt before the first chunk of each choice."""
        n = self.body.n
        for piece in pieces:
            number = piece[0] // n
            self._held.setdefault(number, []).append(piece)
            if self._echoed_logprobs and len(self.runs.runs[number * n].prompt_logprobs) < len(self._prompts[number][1]):
                continue
            for index, delta in self._held.pop(number):
                if index not in self._begun:
                    yield from self._echo(index, number)
                yield self.piece(index, delta)

    def _echo(self, index: int, number: int) -> Iterator[bytes]:
        text, ids = self._prompts[number]
        columns = Columns(self.tokens)
        if self._echoed_logprobs:
            yield from self.logprobs[index].prompt(columns, ids, self.runs.runs[number * self.body.n].prompt_logprobs)
        self._begun.add(index)
        self.begin(index)
        yield from self.chunk_pieces([self.choice(index, Delta(text), columns)])


# Encoder-decoders ------------------------------------------------------------------------------------------------------------------------


async def _with_beams(body: CompletionRequest, text: TextCall[Generator]) -> Response:
    """Answer a request to an encoder-decoder. All outputs of a beam search are sent together, at the end of the search."""
    prompts, model, call, settings = [ids for _, ids in await _prompts(body, text)], text.model, text.call, text.catalog.settings
    _check_beams(body, model)
    _check_runs(body, len(prompts))
    requests = [
        EncoderDecoderRequest(
            prompt=tuple(prompt),
            sampling=Sampling(seed=0, temperature=0.0),
            max_tokens=body.max_tokens,
            n=body.n,
            beams=body.num_beams or body.n,
            attention=body.attention,
            top_logprobs=body.logprobs,
            skip_special_tokens=body.skip_special_tokens,
            **call.origin,
        )
        for prompt in prompts
    ]
    _check_beam_size(body, sum(map(len, prompts)), model, settings, n=len(prompts) * body.n)
    runs = await text.submit(requests, n=body.n, prompt_field="prompt", stream=body.stream)
    return await sent(_BeamAnswer(body, model, runs, AnswerStart.new("cmpl-", None, len(prompts))), call, settings, stream=body.stream)


def _check_beam_size(body: CompletionRequest, source_tokens: int, model: Generator, settings: Settings, *, n: int) -> None:
    """Raise InvalidRequest if there could be too many attention weights, or NeverFits if the rest could exceed `max_answer_bytes`."""
    both = model.manifest.encoder_decoder
    assert both is not None
    size, tokens = AnswerSize(model.vocabulary), min(body.max_tokens, both.max_output)
    each = size.text(tokens) + size.completion_logprobs(tokens, body.logprobs)
    if body.attention:
        if (weights := source_tokens * body.n * tokens) > MOST_WEIGHTS:
            raise InvalidRequest(
                f"attention could have {weights} weights and the most is {MOST_WEIGHTS}: send fewer prompts", param="attention"
            )
        each += size.text(tokens) + -(-size.text(source_tokens * body.n) // n)
    check_size(each, n, settings, fields={"max_tokens": True, "n": body.n > 1}, streamable=False)


def _check_beams(body: CompletionRequest, model: Generator) -> None:
    """Raise InvalidRequest if the request asks for too many outputs, or sets a field that has no effect on an encoder-decoder (such as the
    sampling fields, since the service searches for the most likely text and does not sample)."""
    for name in sorted(body.model_fields_set - _TAKEN):
        value, default = getattr(body, name), type(body).model_fields[name].default
        if value != default and not (name == "temperature" and value == 0):  # the API's defaults are accepted
            raise InvalidRequest(f"{name} has no effect on model {model.name}, which writes the likeliest text: leave it out", param=name)
    if body.max_tokens == 0:
        raise InvalidRequest("max_tokens=0: there would be nothing to answer", param="max_tokens")
    if body.num_beams is not None and body.n > body.num_beams:
        raise InvalidRequest(f"n={body.n} is more than num_beams={body.num_beams}: a beam has no more outputs", param="n")
    if body.n > (most := 8):
        raise InvalidRequest(f"n={body.n} and the most is {most} outputs of a beam", param="n")
    check_streaming(body.stream, body.stream_options)


class _BeamAnswer(CompletionChunks):
    """Builds the answer of an encoder-decoder, as a whole or as a stream, with attention weights if requested."""

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, delta in enumerate(await self.runs.all()):
            choices.append(self.choice(index, delta))
            await asyncio.sleep(0)
        return self.answer(choices)

    def choice(self, index: int, delta: Delta, columns: Columns | None = None) -> dict[str, Any]:
        """Return the JSON that a delta adds to a choice. With the last delta, it includes the attention weights."""
        choice = super().choice(index, delta, columns)
        if self.body.attention and delta.finish_reason is not None:
            choice["attention"] = self._matrix(self.runs.runs[index])
        return choice

    def _matrix(self, run: Run) -> dict[str, Any]:
        prompt = run.request.prompt
        # A run that has no token at the request's deadline has no weights.
        attention = run.attention or Attention((), np.zeros((0, len(prompt)), np.float32))
        weights = Elements()
        for row in attention.weights.astype(np.float64).round(4):
            weights.add(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        return {
            "source": [token_text(token, self.model) for token in prompt],
            "tokens": [token_text(token, self.model) for token in attention.token_ids],
            "weights": weights,
        }


ROUTE = TextRoute(
    path="/v1/completions", body=CompletionRequest, id_prefix="cmpl-", prompt_field="prompt", plan=_plan, encoder_decoder=_with_beams
)
