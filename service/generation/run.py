"""The object from which a caller reads one generation. Iterating over a run yields its deltas as they are made. Leaving the run's context
cancels the run.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType

from service.errors import Overloaded, ServiceError
from service.generation.request import Attention, Delta, GenerationRequest, Token
from service.generation.sampling.prompt_logprobs import PromptLogprobs
from service.generation.text import TextStream
from service.telemetry.usage import Usage


class Run:
    """`async with engine.submit(request) as run: async for delta in run: ...`. All methods are called on one event loop.

    Unread deltas are joined into one delta, so a slow reader never causes more memory to be used than its own completion needs.
    """

    def __init__(self, request: GenerationRequest, usage: Usage, cancel: Callable[["Run"], None], text: TextStream | None = None) -> None:
        """`text` decodes the tokens of an engine that sends each as a `Token`, without text. If it is None, the engine sends deltas with
        text.
        """
        self.request = request
        self.usage = usage
        self.prompt_logprobs = PromptLogprobs()  # one entry per prompt token, None for the first; complete when the first delta arrives
        self.attention: Attention | None = None  # attention weights if requested; complete when the last delta arrives
        self.numerics = ""  # arithmetic of the engine that draws the run's tokens; see `states/numerics.py`
        self.cancelled = False
        self.unread_since: float | None = None  # time at which the first unread token was generated
        self._cancel = cancel
        self._text = text
        self._waiting: list[Token | Delta] = []
        self._unread = 0  # number of tokens in `_waiting`
        self.most_unread: float = math.inf  # limit on unread tokens; a run with more of them fails
        self._error: ServiceError | None = None
        self._ended = False  # True: no delta will follow those in `_waiting`
        self._something = asyncio.Event()
        self._tell: Callable[[bool], None] = lambda ended: self._something.set()

    def listen(self, tell: Callable[[bool], None]) -> None:
        """Register `tell`, which is called on the event loop when deltas are ready for `take`. Its argument is True if no more deltas will
        follow.
        """
        self._tell = tell

    def take(self, most_tokens: int | None = None) -> Delta | None:
        """Return a delta with the tokens made since the previous call, or None if there are no new tokens. The last delta has a finish
        reason. If the run failed, raises the run's error after all its tokens were returned.

        One call returns at most about `most_tokens` tokens, because the caller writes them to the response without a pause.
        """
        waiting = self._first(most_tokens)
        if not waiting and self._error is not None:
            raise self._error.with_traceback(None)
        self.unread_since = time.monotonic() if self._waiting else None
        return self._read(waiting) if waiting else None

    def cancel(self) -> None:
        """Cancel the run. Its slot becomes free within one step. Tokens that were made before can still be read."""
        if not self.cancelled:
            self.cancelled = True
            if not self._ended:
                self._ended = True
                self._tell(True)
                self._cancel(self)

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next delta, for a caller that reads only this run. The iteration ends when the run has ended or was cancelled."""
        while (delta := self.take()) is None:
            if self._ended:
                raise StopAsyncIteration
            self._something.clear()
            await self._something.wait()
        return delta

    # Called by the engine, on the event loop -------------------------------------------------------------------------------------------

    def give(self, made: Token | Delta) -> None:
        first = not self._waiting
        self._waiting.append(made)
        self._unread += len(made.token_ids) if isinstance(made, Delta) else 1
        if first:
            self.unread_since = time.monotonic()
        if made.finish_reason is not None:
            self._ended = True
        elif self._unread > self.most_unread and not self._ended:
            self._error = Overloaded(
                f"{self._unread} tokens were not read, and the most is {self.most_unread}: read faster", retry_after_s=1
            )
            self.cancel()
        if first or self._ended:
            self._tell(self._ended)

    def fail(self, error: ServiceError) -> None:
        if not self._ended:
            self._error, self._ended = error, True
            self._tell(True)

    def said(self, token_ids: Iterable[int]) -> None:
        """Feed tokens that the caller has read before to the text decoder, without returning their text."""
        if self._text is not None:
            self._text.push_all(token_ids)

    def _first(self, most_tokens: int | None) -> list[Token | Delta]:
        """Remove and return the first unread items: about `most_tokens` tokens, or all if it is None."""
        waiting = self._waiting
        if most_tokens is None or self._unread <= most_tokens:
            self._waiting, self._unread = [], 0
            return waiting
        size = number = 0
        while size < most_tokens:  # ends before `_waiting` is empty, because all unread items together have more than `most_tokens` tokens
            made = waiting[number]
            size += len(made.token_ids) if isinstance(made, Delta) else 1
            number += 1
        self._waiting, self._unread = waiting[number:], self._unread - size
        return waiting[:number]

    def _read(self, waiting: list[Token | Delta]) -> Delta:
        """Join tokens and deltas into one delta. If the engine sends tokens, only the last item can be a delta."""
        deltas = [made for made in waiting if isinstance(made, Delta)]
        if self._text is None:
            return join(deltas)
        tokens, finish_reason = [made for made in waiting if isinstance(made, Token)], waiting[-1].finish_reason
        token_ids = tuple([token.token_id for token in tokens])
        text = self._text.push_all(token_ids)
        if finish_reason is not None:
            text += self._text.finish()
        logprobs = tuple([token.logprob for token in tokens if token.logprob is not None])
        return join((Delta(text, token_ids, logprobs, finish_reason), *deltas))


def join(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one run into one."""
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[-1].stop_reason,
    )
