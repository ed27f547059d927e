"""The route `/v1/completions` of OpenAI, which continues texts.

Additions, with vLLM's names: the sampling fields of `SamplingFields`, `prompt_logprobs`, `stop_reason`. As in vLLM, text offsets
count from the beginning of the returned text.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter

from service.call import LAST_EVENT_HEADER, Call
from service.catalog import Catalog
from service.dialects import generation, resuming
from service.dialects.answer_size import AnswerSize, check_size
from service.dialects.generation_schemas import STREAM
from service.dialects.openai import encoder_decoder_completions
from service.dialects.openai.completion_logprobs import Columns, CompletionChunks, Logprobs
from service.dialects.openai.completion_schemas import Completion, CompletionRequest
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.token_json import slices
from service.dialects.resuming import AnswerStart, Resumable
from service.dialects.states import turns
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.model import Generator
from service.generation.request import Delta
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import Elements, Text, done, json_answer
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.settings import Settings
from service.streams.position import EventId
from service.streams.source import Received

MOST_RUNS = 256  # maximum number of choices of a request, for all prompts together


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


PATH = "/v1/completions"


@router.post(PATH, response_model=Completion, responses=STREAM)
async def completions(body: CompletionRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Continue each prompt n times. With `stream`, each chunk contains the new text of a choice since the choice's previous chunk."""
    if body.stream and call.last_event_id is not None:
        wanted = EventId.parse(call.last_event_id, LAST_EVENT_HEADER)
        return await resuming.resume(wanted, {PATH: Resumable(CompletionRequest, answer)}, call, catalog)
    return await answer(body, call, catalog)


async def answer(body: CompletionRequest, call: Call, catalog: Catalog, start: AnswerStart | None = None) -> Any:
    """Answer a request. If the answer continues an interrupted stream, `start` has the stream's seeds, id and position, else it is None."""
    begin = await turns.beginning_of(catalog, call, body.state, body.exact, "state")
    name = body.model or (None if begin is None else begin.record.model)
    if (both := catalog.encoder_decoder(name)) is not None:
        sources = [ids for _, ids in await _prompts(body, both, catalog, call)]
        return await encoder_decoder_completions.complete(body, sources, both, call, catalog, most_runs=MOST_RUNS)
    model = catalog.generator(name)
    _check(body)
    turns.check_model(model, begin)
    if start is None or start.continued is None:
        await turns.check_name(body, catalog, call)
    prompts = await _prompts(body, model, catalog, call, begin)
    if len(prompts) * body.n > MOST_RUNS:
        raise BatchTooLarge(f"{len(prompts)} prompts with n={body.n} are more than {MOST_RUNS} completions: send them in parts", param="n")
    start = start or AnswerStart.new("cmpl-", body.seed, len(prompts))
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
        drawn=start.seeds,
    )
    asked = turns.with_states(asked, body, begin, model=model, catalog=catalog, call=call, turn="")
    _check_size(body, prompts, model, catalog.settings)
    if body.stream:
        asked = start.of_stream(asked, model)
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="prompt", stream=body.stream)
    turns.tell_exactness(call, begin, runs)
    if body.stream:
        generation.bound_unread(runs, body.logprobs, catalog.settings)
        script = _CompletionAnswer(body, model, prompts, runs, start)
        again = body.model_copy(update={"model": model.name, "state": begin and begin.record.id})
        return await resuming.stream(script, again, start, model, call, catalog, path=PATH, durability=body.durability)
    return json_answer(await _CompletionAnswer(body, model, prompts, runs, start).whole(), call.headers)


def _check_size(body: CompletionRequest, prompts: Sequence[tuple[str, list[int]]], model: Generator, settings: Settings) -> None:
    """Raise NeverFits if the whole answer, or the echoed prompts at the beginning of a stream, could exceed `max_answer_bytes`."""
    size, total = AnswerSize(model.vocabulary), 0
    tokens = 0 if body.stream else generation.most_tokens(model, body.max_tokens, min(len(ids) for _, ids in prompts))
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
    turns.check_prompt_logprobs(body.prompt_logprobs, body.state)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: send stream=false", param="prompt_logprobs")
    if body.prompt_logprobs is not None and body.echo and body.logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be combined with echo and logprobs, which give the same", param="prompt_logprobs")
    generation.check_streaming(body.stream, body.stream_options)


async def _prompts(
    body: CompletionRequest, model: Generator, catalog: Catalog, call: Call, begin: turns.Beginning | None = None
) -> list[tuple[str, list[int]]]:
    """Return the text and the token ids of each prompt. If a prompt continues the state `begin`, tokens in the state are left out.

    The text of a prompt that was sent as ids is empty unless the request echoes prompts.
    """
    if isinstance(body.prompt, str):
        given: list[Any] = [body.prompt]
    elif isinstance(body.prompt[0], int):
        given = [body.prompt]
    else:
        given = body.prompt
    prompts: list[tuple[str, list[int]]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, await turns.next_text(model, catalog, call, prompt, begin)))
        else:
            generation.check_ids(prompt, model.manifest.limits.vocab_size, "prompt")
            prompts.append((model.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens) if body.echo else "", prompt))
    return prompts


class _CompletionAnswer(CompletionChunks):
    """Builds the answer of a decoder.

    An echoed prompt is serialised once for all its choices. Its log-probabilities are read from the run of the first of these choices.
    """

    def __init__(
        self, body: CompletionRequest, model: Generator, prompts: Sequence[tuple[str, list[int]]], runs: Runs, start: AnswerStart
    ) -> None:
        super().__init__(body, model, runs, start)
        self._prompts = prompts
        self._echoed_logprobs = body.echo and body.logprobs is not None
        # Indices of the streamed choices that have begun: their echoed prompt was sent.
        self._begun = {index for index, place in enumerate(self.places) if not place.untouched}
        self._rendered: dict[int, tuple[Columns, Logprobs]] = {}  # prompt index -> log-probabilities to echo, until all choices have begun
        self._held: dict[int, list[tuple[int, Delta]]] = {}  # prompt index -> deltas that wait for the prompt's log-probabilities

    # As a whole ----------------------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer. Its parts are serialised while the tokens arrive."""
        body = self.body
        self._counted = [self.new_logprobs() for _ in self._prompts]
        try:
            for counted, (_, ids) in zip(self._counted, self._prompts, strict=True):
                await done(counted.after(ids) if self._echoed_logprobs else ())
        except BaseException:
            self.runs.close()
            raise
        await self.runs.read(self._begin, self._add)
        choices = []
        for at, (_, ids) in enumerate(self._prompts):
            first = at * body.n
            told = self.runs.runs[first].prompt_logprobs
            echoed, of_prompt = Columns(self.tokens), Elements()
            if self._echoed_logprobs:
                await done(self.new_logprobs().prompt(echoed, ids, told))
            elif body.prompt_logprobs is not None:
                await done(map(of_prompt.add, map(self.tokens.prompt, slices(told))))
            for index in range(first, first + body.n):
                columns = Columns(self.tokens)
                columns.add_all(echoed)
                columns.add_all(self._columns[index])
                choice = {**self.choice(index, self._last[index], columns), "text": self._texts[index]}
                choices.append(choice if body.prompt_logprobs is None else {**choice, "prompt_logprobs": of_prompt})
        return self.answer(choices)

    def _begin(self) -> None:
        """Create empty choices. If the request echoes prompts, the text of each choice begins with its prompt."""
        echoed = [Text() for _ in self._prompts]
        for text, (prompt, _) in zip(echoed, self._prompts, strict=True):
            text.add(prompt if self.body.echo else "")
        self._texts = [text.copy() for text in echoed for _ in range(self.body.n)]
        self._columns = [Columns(self.tokens) for _ in self.runs.runs]
        self._last = [Delta("") for _ in self.runs.runs]
        self.logprobs = [self.new_logprobs() for _ in self.runs.runs]
        for index, logprobs in enumerate(self.logprobs):
            logprobs.like(self._counted[index // self.body.n])

    def _add(self, index: int, delta: Delta) -> None:
        self._texts[index].add(delta.text)
        if self.body.logprobs is not None:
            self.logprobs[index].add_to(self._columns[index], delta.logprobs)
        self._last[index] = delta

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
        first = number * self.body.n
        if number not in self._rendered:
            columns, counted = Columns(self.tokens), self.new_logprobs()
            if self._echoed_logprobs:
                yield from counted.prompt(columns, ids, self.runs.runs[first].prompt_logprobs)
            self._rendered[number] = columns, counted
        columns, counted = self._rendered[number]
        self._begun.add(index)
        self.begin(index)
        self.logprobs[index].like(counted)
        if self._begun.issuperset(range(first, first + self.body.n)):
            del self._rendered[number]
        yield from self.chunk_pieces([self.choice(index, Delta(text), columns)])
