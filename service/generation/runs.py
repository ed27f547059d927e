"""The runs of one request, read together: n choices for each of its prompts. The first error ends all of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tokenizers import Tokenizer

from export import contract
from service.call import Call
from service.errors import NotReady, ServiceError
from service.generation.chat.prompt import ChatPrompts
from service.generation.request import Attention, Delta, GenerationRequest, TokenLogprob
from service.generation.run import join
from service.generation.text import Vocabulary
from service.runtime.timer import ResettableTimer
from service.telemetry.usage import Usage

_UNHURRIED_S = 0.25  # between two reads of an answer without streaming
_PIECE_TOKENS = 256  # read at a time: they are written together, and that holds the event loop


class Run(Protocol):
    """One generation; see `service/generation/run.py`."""

    request: GenerationRequest
    usage: Usage
    most_unread: float
    attention: Attention | None

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None]: ...

    def listen(self, tell: Callable[[bool], None]) -> None: ...

    def take(self, most_tokens: int | None = None) -> Delta | None: ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    async def open(self, requests: Sequence[GenerationRequest], key: str) -> Sequence[Run]: ...


class Generator(Protocol):
    """What the routes need of a decoder; see `service/generation/model.py`."""

    name: str
    manifest: contract.Manifest
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    chat_prompts: ChatPrompts | None

    def __hash__(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def max_context(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Runs:
    """Submits all requests or none; `take` until `done`, then or before that `close`. `n` runs in a row share a prompt."""

    @classmethod
    async def submit(
        cls, model: Generator, requests: Sequence[GenerationRequest], call: Call, *, n: int, prompt_field: str, stream: bool
    ) -> "Runs":
        """Queue all of them. `prompt_field` is what the prompt is called in the caller's body, for errors that are about it.

        `stream`: whether the answer will be one, of which a tenant may have so many at the same time.
        """
        call.model = model.name
        if stream:
            call.begin_stream()
        if call.traceparent is not None:
            requests = [replace(request, traceparent=call.traceparent) for request in requests]

        async def opened() -> Sequence[Run]:
            return await model.engine.open(requests, call.session)

        try:
            runs = await opened()
        except ServiceError as error:
            if error.param == "prompt":
                error.param = prompt_field
            elif error.param == "grammar" and (grammar := requests[0].grammar) is not None:  # which all of them share
                error.param = grammar.param
            raise
        made = cls(runs, call, n=n)
        made._open_again = opened
        return made

    def __init__(self, runs: Sequence[Run], call: Call, *, n: int) -> None:
        """Of runs that were queued. See `submit`."""
        self._call = call
        self._n = n
        self._loop = asyncio.get_running_loop()
        self._open_again: Callable[[], Awaitable[Sequence[Run]]] | None = None
        self._listen_to(runs)

    def _listen_to(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._left = len(runs)  # runs whose end was not read yet
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._there = self._ending = False  # whether a run has unread deltas, and whether one of them is an end
        self._not_before = 0.0  # the time from which deltas may be read, unless one is an end
        self._later: asyncio.TimerHandle | None = None
        self._first = 0  # the index of the run that is read first
        self._quiet = ResettableTimer(self._wake)
        for run in self.runs:
            run.listen(self._told)

    @property
    def done(self) -> bool:
        return not self._left

    def bound_unread(self, tokens: float) -> None:
        """End the runs if they have more than so many unread tokens together."""
        for run in self.runs:
            run.most_unread = tokens / len(self.runs)

    async def take(self, timeout_s: float | None = None, interval_s: float = 0.0) -> list[tuple[int, Delta]]:
        """The new deltas of each run, with its index; empty when the time is up. Raises the error of a run, after its deltas.

        Deltas that arrive less than `interval_s` after the last call wait for more, unless one is an end. Many tokens are read in pieces,
        and other tasks run in between.
        """
        taken: list[tuple[int, Delta]] = []
        if self._error is None:
            if self._ending:
                await asyncio.sleep(0)
            await self._something(timeout_s)
            taken = self._polled()
        if not taken and self._error is not None:
            self.close()
            raise self._error
        self._not_before = self._loop.time() + interval_s
        return taken

    async def read(self, begin: Callable[[], object], add: Callable[[int, Delta], object]) -> None:
        """Read every run to its end: call `begin`, then `add` with each index and delta.

        If their replica is lost, another one restarts them, once only: the request itself may have ended the replica.
        """
        try:
            try:
                await self._read(begin, add)
            except NotReady as error:
                if not error.elsewhere or self._open_again is None:
                    raise
                self._listen_to(await self._open_again())
                await self._read(begin, add)
        finally:
            self.close()

    async def _read(self, begin: Callable[[], object], add: Callable[[int, Delta], object]) -> None:
        begin()
        while not self.done:
            for index, delta in await self.take(interval_s=_UNHURRIED_S):
                add(index, delta)

    async def all(self) -> list[Delta]:
        """Read every run to its end. Returns one delta for each."""
        made: list[list[Delta]] = []

        def begin() -> None:
            made[:] = [[] for _ in self.runs]

        await self.read(begin, lambda index, delta: made[index].append(delta))
        return [join(deltas) for deltas in made]

    def close(self) -> None:
        """Cancel unfinished runs, and account for the tokens until now."""
        self._quiet.stop()
        if self._later is not None:
            self._later.cancel()
        for run in self.runs:
            run.cancel()
        self._call.completion_tokens = self.completion_tokens
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

    def _polled(self) -> list[tuple[int, Delta]]:
        self._there = self._ending = False
        taken: list[tuple[int, Delta]] = []
        left = _PIECE_TOKENS
        for at in range(len(self.runs)):
            index = (self._first + at) % len(self.runs)
            try:
                while left > 0 and (delta := self.runs[index].take(left)) is not None:  # a run raises its error after its deltas
                    taken.append((index, delta))
                    left -= len(delta.token_ids)
                    self._left -= delta.finish_reason is not None
            except Exception as error:
                self._error = self._error or error
            if left <= 0:  # there may be more
                self._first = (index + 1) % len(self.runs)
                self._there = self._ending = True
                break
        else:
            self._first = 0
        return taken

    async def _something(self, timeout_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        self._look()
        if self._waiter.done():
            return
        if timeout_s is not None:
            self._quiet.set(timeout_s)
        await self._waiter
        self._quiet.clear()

    def _told(self, ended: bool) -> None:
        """Called by a run with new deltas."""
        self._there = True
        self._ending |= ended
        self._look()

    def _look(self) -> None:
        """Wake the reader if it may read now; else set a timer."""
        if self._there:
            left_s = 0.0 if self._ending else self._not_before - self._loop.time()
            if left_s <= 0:
                self._wake()
            elif self._later is None:
                self._later = self._loop.call_later(left_s, self._look_again)

    def _look_again(self) -> None:
        self._later = None
        self._look()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
