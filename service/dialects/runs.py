"""The runs of one request, read together: n choices for each of its prompts.

Each run is read by a task of its own into a place where its deltas wait, joined, for whoever takes them. The first error ends all of them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from export import contract
from service.call import Call
from service.chat_template import ChatTemplate
from service.errors import InvalidRequest, RuntimeFailed
from service.generation.request import Delta, GenerationRequest, Grammar, TokenLogprob, Usage


class Run(Protocol):
    """One generation; see `service/generation/run.py`."""

    usage: Usage
    prompt_logprobs: list[TokenLogprob | None]

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    async def prepare(self, grammar: Grammar) -> None: ...

    def submit(self, request: GenerationRequest) -> Run: ...


class Generator(Protocol):
    """What the routes need of a decoder; see `service/generation/model.py`."""

    name: str
    manifest: contract.Manifest
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def __hash__(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def max_context(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...


class Runs:
    """Submits all requests or none; `take` until `done`, then or before that `close`. `n` runs in a row share a prompt.

    `prompt_field` is what the prompt is called in the caller's body, for errors that are about it.
    """

    @classmethod
    async def submit(cls, model: Generator, requests: Sequence[GenerationRequest], call: Call, *, n: int, prompt_field: str) -> "Runs":
        """Queue all of them. A grammar that is not known yet is compiled first, which takes its time."""
        for grammar in {request.grammar for request in requests if request.grammar is not None}:
            await model.engine.prepare(grammar)
        return cls(model, requests, call, n=n, prompt_field=prompt_field)

    def __init__(self, model: Generator, requests: Sequence[GenerationRequest], call: Call, *, n: int, prompt_field: str) -> None:
        """See `submit`."""
        self._call = call
        self._n = n
        self.runs: list[Run] = []
        self._waiting: list[list[Delta]] = [[] for _ in requests]
        self._left = len(requests)  # runs that have not ended, or whose end was not taken
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._readers: list[asyncio.Task[None]] = []
        call.model = model.name
        try:
            for request in requests:
                self.runs.append(model.engine.submit(request))
        except InvalidRequest as error:
            self.close()
            if error.param == "prompt":
                error.param = prompt_field
            raise
        except BaseException:
            self.close()
            raise
        self._readers = [asyncio.create_task(self._read(index, run)) for index, run in enumerate(self.runs)]

    @property
    def done(self) -> bool:
        return not self._left

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, Delta]]:
        """What each run has made since the last time, by its index; empty when the time is up. Raises what befell one of them."""
        if not any(self._waiting) and self._error is None:
            await self._something(timeout_s)
        if not any(self._waiting) and self._error is not None:
            self.close()
            raise self._error
        taken = [(index, _joined(deltas)) for index, deltas in enumerate(self._waiting) if deltas]
        for index, delta in taken:
            self._waiting[index] = []
            self._left -= delta.finish_reason is not None
        return taken

    async def all(self) -> list[Delta]:
        """Every run to its end, as one delta each."""
        try:
            made: list[list[Delta]] = [[] for _ in self.runs]
            while not self.done:
                for index, delta in await self.take():
                    made[index].append(delta)
            return [_joined(deltas) for deltas in made]
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs. What was counted until now is the request's account."""
        for reader in self._readers:
            reader.cancel()
        for run in self.runs:
            run.cancel()
        self._call.tokens = self.prompt_tokens + self.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, however many choices it has."""
        return sum(run.usage.prompt_tokens for run in self.runs[:: self._n])

    @property
    def cached_tokens(self) -> int:
        return sum(run.usage.cached_tokens for run in self.runs[:: self._n])

    @property
    def completion_tokens(self) -> int:
        return sum(run.usage.completion_tokens for run in self.runs)

    async def _read(self, index: int, run: Run) -> None:
        try:
            delta = None
            async for delta in run:
                self._waiting[index].append(delta)
                self._wake()
            if delta is None or delta.finish_reason is None:
                raise RuntimeFailed("the run ended without a reason")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self._error is None:
                self._error = error
                for other in self.runs:
                    other.cancel()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _something(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _joined(deltas: list[Delta]) -> Delta:
    """Deltas of one run, one after the other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )
