"""Reads the runs of one request together: n choices for each of its prompts. The first error ends all of them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from service.call import Call
from service.errors import ServiceError
from service.generation.model import Generator
from service.generation.reopening import Reopening
from service.generation.request import Delta, GenerationRequest
from service.generation.run import Run, join
from service.runtime.timer import ResettableTimer
from service.states.record import new_state_id

log = logging.getLogger("attnserve")

_UNHURRIED_S = 0.25  # minimum interval between two reads of a response that is not streamed
_PIECE_TOKENS = 256  # most tokens per read: they are written in one piece, which blocks the event loop


class Runs:
    """The runs of one request: all are submitted or none. Call `take` until `done`, and `close` at the end or earlier. Each `n` consecutive
    runs share a prompt.

    If the process that generates them is lost, they go on in another one; the reader sees a pause.
    """

    @classmethod
    async def submit(
        cls, model: Generator, requests: Sequence[GenerationRequest], call: Call, *, n: int, prompt_field: str, stream: bool
    ) -> "Runs":
        """Queue the runs of all requests. `prompt_field` is the name of the prompt in the client's body, for error messages.

        `stream` means that the response is streamed, so it counts against the tenant's limit of concurrent streams.
        """
        call.model = model.name
        if stream:
            call.begin_stream()
        requests = [replace(each, checkpoint=each.checkpoint or new_state_id()) if each.takes_known else each for each in requests]
        if call.traceparent is not None:
            requests = [replace(request, traceparent=call.traceparent) for request in requests]

        try:
            runs = await model.engine.open(requests, call.session)
        except ServiceError as error:
            if error.param == "prompt":
                error.param = prompt_field
            elif error.param == "grammar" and (grammar := requests[0].grammar) is not None:  # the grammar, which all requests share
                error.param = grammar.param
            raise
        return cls(runs, call, n=n, reopening=Reopening(model.engine, requests, call.session))

    def __init__(self, runs: Sequence[Run], call: Call, *, n: int, reopening: Reopening | None = None) -> None:
        """Wrap runs that are already queued. See `submit`. Without `reopening`, a lost run ends with its error."""
        self.runs = list(runs)
        self._call = call
        self._n = n
        self._loop = asyncio.get_running_loop()
        self._reopening = reopening
        self._opening: asyncio.Task[None] | None = None
        self._left = len(runs)  # number of runs that were not read to their end
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._there = self._ending = False  # whether a run has unread deltas; whether one of them is the last of its run
        self._not_before = 0.0  # time before which deltas are not read, except the last delta of a run
        self._later: asyncio.TimerHandle | None = None
        self._first = 0  # index of the run that is read first
        self._quiet = ResettableTimer(self._wake)
        for run in self.runs:
            run.listen(self._told)

    @property
    def done(self) -> bool:
        return not self._left

    def bound_unread(self, tokens: float) -> None:
        """Limit the unread tokens to `tokens`, shared equally by the runs. A run that exceeds its share fails with Overloaded."""
        for run in self.runs:
            run.most_unread = tokens / len(self.runs)

    async def take(self, timeout_s: float | None = None, interval_s: float = 0.0) -> list[tuple[int, Delta]]:
        """Wait for new deltas and return them with the index of their run; an empty list after `timeout_s`. Raises the first error of
        a run, after the deltas before it.

        Until `interval_s` after the last call, deltas are gathered, unless a run has ended. At most `_PIECE_TOKENS` or so are returned at
        a time, so that other tasks can run in between.
        """
        taken: list[tuple[int, Delta]] = []
        if self._error is None:
            if self._ending:
                await asyncio.sleep(0)
            await self._something(timeout_s)
            taken = self._polled()
        if not taken and self._error is not None and not self._opened_again():
            self.close()
            raise self._error
        self._not_before = self._loop.time() + interval_s
        return taken

    async def read(self, begin: Callable[[], object], add: Callable[[int, Delta], object]) -> None:
        """Read every run to its end: call `begin`, then `add` with the run's index for each delta."""
        try:
            begin()
            while not self.done:
                for index, delta in await self.take(interval_s=_UNHURRIED_S):
                    add(index, delta)
        finally:
            self.close()

    async def all(self) -> list[Delta]:
        """Read every run to its end, and return one delta for each run."""
        made: list[list[Delta]] = []

        def begin() -> None:
            made[:] = [[] for _ in self.runs]

        await self.read(begin, lambda index, delta: made[index].append(delta))
        return [join(deltas) for deltas in made]

    def close(self) -> None:
        """Cancel unfinished runs, and record the tokens used so far in the call's accounting."""
        self._quiet.stop()
        if self._opening is not None:
            self._opening.cancel()
        if self._later is not None:
            self._later.cancel()
        for run in self.runs:
            run.cancel()
        self._call.completion_tokens = self.completion_tokens
        self._call.tokens = self.prompt_tokens + self.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens. Each prompt counts once, however many choices it has."""
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
                while left > 0 and (delta := self._taken(index, left)) is not None:  # a run raises its error after its deltas
                    taken.append((index, delta))
                    left -= len(delta.token_ids)
                    self._left -= delta.finish_reason is not None
            except Exception as error:
                self._error = self._error or error
            if left <= 0:  # stop here, because this run may have more deltas
                self._first = (index + 1) % len(self.runs)
                self._there = self._ending = True
                break
        else:
            self._first = 0
        return taken

    def _taken(self, index: int, most_tokens: int) -> Delta | None:
        """Return what run `index` has made since the last call and its reader does not have, or None."""
        while (delta := self.runs[index].take(most_tokens)) is not None:
            if self._reopening is None or (delta := self._reopening.new(index, delta)) is not None:
                return delta
        return None

    def _opened_again(self) -> bool:
        """Start to open the unfinished runs again if they were lost. Returns whether they can still go on."""
        if self._reopening is None or not self._reopening.may(self._error):
            return False
        log.warning("runs lost", extra={**self._call.identity, "reason": str(self._error)})
        self._error = None
        self._opening = asyncio.create_task(self._open_again(self._reopening))
        return True

    async def _open_again(self, reopening: Reopening) -> None:
        before = list(self.runs)
        try:
            await reopening.open(self.runs)
        except Exception as error:
            self._error = error
        else:
            log.info("runs opened again", extra=self._call.identity)
        for run, old in zip(self.runs, before, strict=True):
            if run is not old:
                old.listen(lambda ended: None)
                run.listen(self._told)
        self._told(self._error is not None)

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
        """Note that a run has new deltas. The run calls this; `ended` is True after its last delta."""
        self._there = True
        self._ending |= ended
        self._look()

    def _look(self) -> None:
        """Wake the reader if there are deltas that it may read now. If it may read them only later, set a timer."""
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
