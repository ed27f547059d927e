"""OpenAI: `/v1/completions`, text continued.

Beyond it, with vLLM's names: the sampling fields of `SamplingFields`, `prompt_logprobs`, `stop_reason`. Offsets count from the beginning of
the text that is sent, as in vLLM.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from service.catalog import Catalog
from service.dialects import generation
from service.dialects.answer_size import AnswerSize, check_size
from service.dialects.generation_schemas import (
    STREAM,
)
from service.dialects.openai import writings
from service.dialects.openai.chunks import Chunks
from service.dialects.openai.completion_logprobs import Columns, Logprobs
from service.dialects.openai.completion_schemas import Completion, CompletionRequest
from service.dialects.openai.embeddings import ERRORS
from service.dialects.openai.token_json import slices
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.request import Delta
from service.generation.runs import Generator, Runs
from service.http import sse
from service.http.answers import Elements, Text, done, json_answer
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.settings import Settings

MOST_RUNS = 256  # choices of all prompts of a request together


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
    _check_size(body, prompts, model, catalog.settings)
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="prompt", stream=body.stream)
    if body.stream:
        generation.bound_unread(runs, body.logprobs, catalog.settings)
        return await sse.stream(runs, _CompletionStream(body, model, prompts, runs), call, catalog.settings)
    return json_answer(await _CompletionAnswer(body, model, prompts, runs).answer(), call.headers)


def _check_size(body: CompletionRequest, prompts: Sequence[tuple[str, list[int]]], model: Generator, settings: Settings) -> None:
    """Check the size of the whole answer, or of the echoed prompts at the beginning of a stream."""
    size, total = AnswerSize(model.vocabulary), 0
    tokens = 0 if body.stream else generation.most_tokens(model, body.max_tokens, min(len(ids) for _, ids in prompts))
    for text, ids in prompts:
        total += size.text(tokens) + size.completion_logprobs(tokens, body.logprobs) + size.prompt_logprobs(len(ids), body.prompt_logprobs)
        if body.echo:
            total += 6 * len(text) + size.completion_logprobs(len(ids), body.logprobs)
    fields = [*(["n"] if body.n > 1 else []), "max_tokens"]
    fields += [name for name in ("logprobs", "prompt_logprobs") if getattr(body, name)]
    check_size(-(-total // len(prompts)), len(prompts) * body.n, settings, fields=", ".join(fields), streamable=not body.stream)


def _check(body: CompletionRequest) -> None:
    """Check fields that depend on each other, which a schema cannot."""
    for name in ("num_beams", "attention"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is for encoder-decoders, and this model is a decoder: leave it out", param=name)
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
    """Each prompt as text and ids; the text only if it is echoed."""
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


class _CompletionAnswer(Chunks):
    """An answer without streaming, serialised while its tokens arrive."""

    def __init__(self, body: CompletionRequest, model: Generator, prompts: Sequence[tuple[str, list[int]]], runs: Runs) -> None:
        super().__init__(model, runs, None, id_prefix="cmpl-", object_="text_completion")
        self._body, self._prompts = body, prompts
        self._counted = [Logprobs(model, skip_special_tokens=body.skip_special_tokens) for _ in prompts]  # the prompts, if they are echoed

    async def answer(self) -> dict[str, Any]:
        body = self._body
        try:
            if body.echo and body.logprobs is not None:
                for counted, (_, ids) in zip(self._counted, self._prompts, strict=True):
                    await done(counted.after(ids))
        except BaseException:
            self.runs.close()
            raise
        await self.runs.read(self._begin, self._add)
        choices = []
        for at, (_, ids) in enumerate(self._prompts):
            first = at * body.n
            told = self.runs.runs[first].prompt_logprobs
            echoed, of_prompt = Columns(self.tokens), Elements()
            if body.echo and body.logprobs is not None:
                offsets = Logprobs(self.model, skip_special_tokens=body.skip_special_tokens)
                await done(offsets.prompt(echoed, ids, told))
            elif body.prompt_logprobs is not None:
                await done(map(of_prompt.add, map(self.tokens.prompt, slices(told))))
            choices += [self._choice(index, echoed, of_prompt) for index in range(first, first + body.n)]
        return {**self.head, "choices": choices, "usage": generation.usage_of(self.runs)}

    def _begin(self) -> None:
        """Start the choices, after their prompts if these are echoed."""
        self._texts: list[Text] = []
        self._offsets: list[Logprobs] = []
        self._columns: list[Columns] = []
        self._last: list[Delta] = []
        for (text, _), counted in zip(self._prompts, self._counted, strict=True):
            echoed = Text()
            if self._body.echo:
                echoed.add(text)
            for _ in range(self._body.n):
                self._texts.append(echoed.copy())
                self._offsets.append(Logprobs(self.model, skip_special_tokens=self._body.skip_special_tokens))
                self._columns.append(Columns(self.tokens))
                self._last.append(Delta(""))
                if self._body.echo:
                    self._offsets[-1].like(counted)

    def _add(self, index: int, delta: Delta) -> None:
        self._texts[index].add(delta.text)
        if self._body.logprobs is not None:
            self._offsets[index].add_to(self._columns[index], delta.logprobs)
        self._last[index] = delta

    def _choice(self, index: int, echoed: Columns, of_prompt: Elements) -> dict[str, Any]:
        """`echoed` and `of_prompt` are shared by all choices of the prompt."""
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = Columns(self.tokens)
            logprobs.add_all(echoed)
            logprobs.add_all(self._columns[index])
        choice: dict[str, Any] = {
            "index": index,
            "text": self._texts[index],
            "logprobs": None if logprobs is None else logprobs.json(),
            "finish_reason": self._last[index].finish_reason,
            "stop_reason": self._last[index].stop_reason,
        }
        return choice if self._body.prompt_logprobs is None else {**choice, "prompt_logprobs": of_prompt}


@dataclass
class _Sent:
    """The state of one choice of a stream."""

    logprobs: Logprobs
    begun: bool = False


class _CompletionStream(Chunks):
    """The events of a stream. An echoed prompt is rendered once for all its choices, with log-probabilities from the first choice's run."""

    def __init__(self, body: CompletionRequest, model: Generator, prompts: Sequence[tuple[str, list[int]]], runs: Runs) -> None:
        self._body, self._prompts = body, prompts
        self._sent = [_Sent(Logprobs(model, skip_special_tokens=body.skip_special_tokens)) for _ in runs.runs]
        self._rendered: dict[int, tuple[Columns, Logprobs]] = {}  # by prompt, until all its choices have begun
        self._held: dict[int, list[tuple[int, Delta]]] = {}  # by prompt: deltas that wait for its log-probabilities
        super().__init__(model, runs, body.stream_options, id_prefix="cmpl-", object_="text_completion")

    def opening(self) -> bytes:
        return b""

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> sse.Written:
        if self._body.echo and not all(self._sent[index].begun for index, _ in pieces):
            return self._begun(pieces)
        return b"".join([self._chunk(index, delta) for index, delta in pieces if generation.worth_sending(delta)])

    def _begun(self, pieces: Sequence[tuple[int, Delta]]) -> Iterator[bytes]:
        """Chunks, with the echoed prompt before the first of each choice."""
        n = self._body.n
        for piece in pieces:
            number = piece[0] // n
            self._held.setdefault(number, []).append(piece)
            if self._body.logprobs is not None and len(self.runs.runs[number * n].prompt_logprobs) < len(self._prompts[number][1]):
                continue
            for index, delta in self._held.pop(number):
                if not self._sent[index].begun:
                    yield from self._echo(index, number)
                if generation.worth_sending(delta):
                    yield self._chunk(index, delta)

    def _echo(self, index: int, number: int) -> Iterator[bytes]:
        text, ids = self._prompts[number]
        if number not in self._rendered:
            columns = Columns(self.tokens)
            counted = Logprobs(self.model, skip_special_tokens=self._body.skip_special_tokens)
            if self._body.logprobs is not None:
                yield from counted.prompt(columns, ids, self.runs.runs[number * self._body.n].prompt_logprobs)
            self._rendered[number] = columns, counted
        columns, counted = self._rendered[number]
        self._sent[index].begun = True
        self._sent[index].logprobs.like(counted)
        if all(sent.begun for sent in self._sent[number * self._body.n : (number + 1) * self._body.n]):
            del self._rendered[number]
        yield from self.chunk_pieces([self._choice(index, Delta(text), columns)])

    def _chunk(self, index: int, delta: Delta) -> bytes:
        """What this delta adds to the choice."""
        columns = self._sent[index].logprobs.columns(delta.logprobs) if self._body.logprobs is not None else None
        return self.chunk([self._choice(index, delta, columns)])

    def _choice(self, index: int, delta: Delta, columns: Columns | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if self._body.logprobs is None or columns is None else columns.json(),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
