"""The caller's end of one generation: deltas come out of it as they are made, and leaving it ends the work."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from service.errors import ServiceError
from service.generation.request import Delta, GenerationRequest, TokenLogprob, Usage


class Run:
    """`async with engine.submit(request) as run: async for delta in run: ...`. Lives on one event loop.

    Deltas that were not taken yet are joined into one, so a slow reader holds no more than its own completion.
    """

    def __init__(self, request: GenerationRequest, usage: Usage, cancel: Callable[["Run"], None]) -> None:
        self.request = request
        self.usage = usage
        self.prompt_logprobs: list[TokenLogprob | None] = []  # one for each prompt token, None for the first; complete with the first delta
        self.cancelled = False
        self.read_at = time.monotonic()  # when something was last taken
        self._cancel = cancel
        self._waiting: Delta | None = None
        self._error: ServiceError | None = None
        self._ended = False  # nothing comes after what waits now
        self._something = asyncio.Event()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Give the run up: its slot is free within one step. What was already made can still be read."""
        if not self.cancelled:
            self.cancelled = True
            if not self._ended:
                self._ended = True
                self._something.set()
                self._cancel(self)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; the last one has a finish reason. Raises what befell the run instead, after the deltas before it."""
        while self._waiting is None:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._ended:
                raise StopAsyncIteration
            self._something.clear()
            await self._something.wait()
        delta, self._waiting = self._waiting, None
        self.read_at = time.monotonic()
        return delta

    @property
    def unread(self) -> bool:
        """Something was made and has not been taken."""
        return self._waiting is not None

    # Called by the engine, on the event loop -------------------------------------------------------------------------------------------

    def give(self, delta: Delta) -> None:
        self._waiting = delta if self._waiting is None else join(self._waiting, delta)
        self._ended = self._ended or delta.finish_reason is not None
        self._something.set()

    def fail(self, error: ServiceError) -> None:
        if not self._ended:
            self._error, self._ended = error, True
            self._something.set()


def join(first: Delta, second: Delta) -> Delta:
    """Two deltas of a run, one after the other, as one."""
    return Delta(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        second.stop_reason,
    )
