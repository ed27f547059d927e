"""Reads the runs of one request together: n choices for each of its prompts. The first error ends all of them.

At the deadline a request is answered with the tokens that it has, so a run without a token fails only if all runs have none.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from service.call import Call
from service.errors import DeadlineExceeded, ServiceError
from service.generation.model import Generator
from service.generation.reopening import Reopening
from service.generation.request import Delta, GenerationRequest
from service.generation.run import Run, join
from service.states.record import new_state_id

log = logging.getLogger("attnserve")

_UNHURRIED_S = 0.25  # minimum interval between two reads of a response that is not streamed
_PIECE_TOKENS = 256  # most tokens per read; writing them to a response blocks the event loop


class Runs:
    """The runs of one request. Either all of them are submitted, or none. Call `take` until `done`, and `close` at the end or earlier. Each
    group of `n` consecutive runs has the same prompt.

    If the process that generates the runs is lost, they continue in another process, and the reader sees only a pause.
    """

    @classmethod
    async def submit(
        cls, model: Generator, requests: Sequence[GenerationRequest], call: Call, *, n: int, prompt_field: str, stream: bool
    ) -> "Runs":
        """Queue the runs of all requests, and return them. `prompt_field` is the name of the prompt's field in the client's body, for error
        messages.

        `stream` means that the response is streamed, so it counts against the tenant's limit of concurrent streams.
        """
        call.model = model.name
        if stream:
            await call.begin_stream()
        requests = [replace(each, checkpoint=each.checkpoint or new_state_id()) if each.takes_known else each for each in requests]
        try:
            runs = await model.engine.open(requests, call.session)
        except ServiceError as error:
            if error.param == "prompt":
                error.param = prompt_field
            elif error.param == "grammar" and (grammar := requests[0].grammar) is not None:  # all requests of a call have the same grammar
                error.param = grammar.param
            raise
        call.pass_on_deadline()
        return cls(runs, call, n=n, reopening=Reopening(model.engine, requests, call.session))

    def __init__(self, runs: Sequence[Run], call: Call, *, n: int, reopening: Reopening | None = None) -> None:
        """Wrap runs that are already queued. See `submit`. If `reopening` is None, runs whose process is lost end with an error."""
        self.runs = list(runs)
        self._call = call
        self._n = n
        self._loop = asyncio.get_running_loop()
        self._reopening = reopening
        self._opening: asyncio.Task[None] | None = None
        self._known = sum(len(run.request.known) for run in runs)  # tokens that were drawn and charged before, and are now fed again
        self._late: set[int] = set()  # indices of the runs that were ended here, because the deadline passed before their first token
        self._left = len(runs)  # number of runs that were not read to their end
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._there = self._ending = False  # whether a run has unread deltas; whether one of them is the last of its run
        self._not_before = 0.0  # time before which deltas are not read, except the last delta of a run
        self._later: asyncio.TimerHandle | None = None
        self._first = 0  # index of the run that is read first
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
        """Wait for new deltas, and return each with the index of its run. Returns an empty list if none arrives within `timeout_s`. If a
        run failed, raises its error after all earlier deltas were returned.

        Unless a run has ended, deltas are gathered until the `interval_s` of the previous call has passed. One call returns about
        `_PIECE_TOKENS` tokens at most, so that other tasks can run between calls.
        """
        taken: list[tuple[int, Delta]] = []
        if self._error is None:
            if self._ending:
                await asyncio.sleep(0)
            await self._something(timeout_s)
            # While lost runs are being opened again, they are not read: the new runs repeat their unread deltas.
            if self._opening is None:
                taken = self._polled()
        if not taken and self._error is not None and not self._opened_again():
            self.close()
            raise self._error
        self._not_before = self._loop.time() + interval_s
        return taken

    async def read(self, add: Callable[[int, Delta], object]) -> None:
        """Read every run to its end. Calls `add` for each delta, with the index of its run."""
        try:
            while not self.done:
                for index, delta in await self.take(interval_s=_UNHURRIED_S):
                    add(index, delta)
        finally:
            self.close()

    async def all(self) -> list[Delta]:
        """Read every run to its end, and return one delta for each run."""
        made: list[list[Delta]] = [[] for _ in self.runs]
        await self.read(lambda index, delta: made[index].append(delta))
        return [join(deltas) for deltas in made]

    def close(self) -> None:
        """Cancel unfinished runs, and record the tokens used so far in the call's accounting."""
        if self._opening is not None:
            self._opening.cancel()
        if self._later is not None:
            self._later.cancel()
        for run in self.runs:
            run.cancel()
        self._call.completion_tokens = max(self.completion_tokens - self._known, 0)
        self._call.tokens = self.prompt_tokens - self._state_tokens + self.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens before the completions: tokens of the prompts, and tokens of the states that the prompts continue.
        Each prompt counts once, however many choices it has.
        """
        return self._state_tokens + sum(run.usage.prompt_tokens for run in self.runs[:: self._n])

    @property
    def cached_tokens(self) -> int:
        """Return how many of `prompt_tokens` did not have to be computed, because the state after them had been kept."""
        return self._state_tokens + sum(run.usage.cached_tokens for run in self.runs[:: self._n])

    @property
    def _state_tokens(self) -> int:
        """Return the number of tokens of the states that the prompts continue. These tokens are not charged again."""
        return sum(start.position for run in self.runs[:: self._n] if (start := run.request.start) is not None)

    @property
    def completion_tokens(self) -> int:
        return sum(run.usage.completion_tokens for run in self.runs)

    def _polled(self) -> list[tuple[int, Delta]]:
        self._there = self._ending = False
        taken: list[tuple[int, Delta]] = []
        left = _PIECE_TOKENS
        for at in range(len(self.runs)):
            index = (self._first + at) % len(self.runs)
            if index in self._late:
                continue
            try:
                while left > 0 and (delta := self._taken(index, left)) is not None:  # `_taken` raises a run's error after its deltas
                    taken.append((index, delta))
                    left -= len(delta.token_ids)
                    self._left -= delta.finish_reason is not None
            except Exception as error:
                if isinstance(error, DeadlineExceeded) and self.completion_tokens:
                    taken.append((index, Delta("", finish_reason="length")))
                    self._late.add(index)
                    self._left -= 1
                else:
                    self._error = self._error or error
            if left <= 0:  # stop here, because this run may have more deltas
                self._first = (index + 1) % len(self.runs)
                self._there = self._ending = True
                break
        else:
            self._first = 0
        return taken

    def _taken(self, index: int, most_tokens: int) -> Delta | None:
        """Return the next delta of run `index` that its reader has not received yet, or None if there is none."""
        while (delta := self.runs[index].take(most_tokens)) is not None:
            if self._reopening is None or (delta := self._reopening.new(index, delta)) is not None:
                return delta
        return None

    def _opened_again(self) -> bool:
        """If the process of the unfinished runs was lost, start to open these runs again. Returns whether this was started."""
        if self._reopening is None or not self._reopening.may(self._error):
            return False
        log.warning("runs lost", extra={**self._call.identity, "reason": str(self._error)})
        self._error = None
        self._there = self._ending = False
        for run in self.runs:
            run.listen(lambda ended: None)
        self._opening = asyncio.create_task(self._open_again(self._reopening))
        return True

    async def _open_again(self, reopening: Reopening) -> None:
        try:
            await reopening.open(self.runs)
        except Exception as error:
            self._error = error
        else:
            log.info("runs opened again", extra=self._call.identity)
        for run in self.runs:
            run.listen(self._told)
        self._opening = None
        self._told(self._error is not None)

    async def _something(self, timeout_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        self._look()
        if self._waiter.done():
            return
        over = None if timeout_s is None else self._loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            if over is not None:
                over.cancel()

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
