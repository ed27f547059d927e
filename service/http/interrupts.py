"""Ends the work on a request before its end: at its deadline, or when its client disconnects.

These are classes and not generators, because every request enters them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from service.errors import ServiceError

WHOLE = "attnserve.whole"  # key in the ASGI scope: true once the server has received the whole body
_UNWATCHED_S = 0.1  # seconds after which `Leaving` begins to watch for a disconnect of the client

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """Raised if the client closed the connection before it received its answer."""


class Interruptible:
    """A context manager whose `with` block raises `error()` after a call of `interrupt`, which cancels the block."""

    __slots__ = ("_error", "_interrupted", "_task")

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error
        self._interrupted = False

    def __enter__(self) -> Callable[[], None]:
        self._task = asyncio.current_task()
        return self.interrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._interrupted and isinstance(error, asyncio.CancelledError) and self._task is not None:
            self._task.uncancel()
            raise self._error() from None

    def interrupt(self) -> None:
        assert self._task is not None
        self._interrupted = True
        self._task.cancel()


class EndedAt(Interruptible):
    """A context manager whose `with` block raises `error()` at the deadline. It is cheaper than `asyncio.timeout` if the block ends in
    time.
    """

    __slots__ = ("_deadline", "_timer")

    def __init__(self, deadline: float, error: Callable[[], ServiceError]) -> None:
        super().__init__(error)
        self._deadline = deadline

    def __enter__(self) -> Callable[[], None]:
        self._timer = asyncio.get_running_loop().call_later(max(self._deadline - time.monotonic(), 0), self.interrupt)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        super().__exit__(kind, error, trace)

    def disarm(self) -> None:
        """From now on, the deadline does not end the block."""
        self._timer.cancel()


class Leaving(Interruptible):
    """A context manager whose `with` block raises ClientGone when the client disconnects. Watching for a disconnect costs a task, so it
    begins only after `_UNWATCHED_S` seconds.
    """

    __slots__ = ("_receive", "_timer", "_watch")

    def __init__(self, receive: Receive) -> None:
        super().__init__(ClientGone)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Callable[[], None]:
        self._timer = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._begin)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        super().__exit__(kind, error, trace)

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt()
