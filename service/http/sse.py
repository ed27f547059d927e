"""Server-sent events: an answer that is sent while it is generated.

Framing is that of the HTML standard, section 9.2: `data: {json}`, an empty line, comments with a leading colon. An error before the first
piece, and before the first heartbeat, has its own status. Later the status is sent already, so an error is the last event of the stream, in
the dialect's form: a failed stream never ends like a complete one.

A slow client delays only its own stream. The pieces that it has not read are joined into one, so memory is bounded by the length of the
completion. A client that reads nothing for `stream_stall_s` counts as gone. The work is cancelled when the stream ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.call import Call
from service.errors import ServiceError
from service.http.answers import PIECE_BYTES, in_slices, pieces, whole
from service.http.edge import ClientGone
from service.runtime.timer import ResettableTimer
from service.settings import Settings

log = logging.getLogger("attnserve")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Piece = TypeVar("Piece")
Taken = TypeVar("Taken", covariant=True)
Told = TypeVar("Told", contravariant=True)
Written = bytes | Iterator[bytes]


class PieceSource(Protocol[Taken]):
    """The pieces of an answer, as they are generated."""

    @property
    def done(self) -> bool:
        """Whether all pieces were taken."""

    async def take(self, timeout_s: float, interval_s: float) -> Sequence[Taken]:
        """The pieces since the last call. Waits up to `timeout_s` for one. Raises the source's error.

        Pieces that arrive less than `interval_s` after the last call may wait that long for more.
        """

    def close(self) -> None:
        """Cancel the generation. Idempotent."""


class Script(Protocol[Told]):
    """Turns pieces into the events of a dialect. An empty result sends nothing; a large one is an iterator."""

    def opening(self) -> bytes: ...

    def pieces(self, pieces: Sequence[Told]) -> Written: ...

    def closing(self) -> Written: ...

    def failure(self, error: ServiceError) -> bytes: ...


def event(content: Any, name: str | None = None) -> bytes:
    """One event of small content. `name` is its type, in dialects with several."""
    return b"".join((_opening(name), whole(content), b"\n\n"))


def event_pieces(content: Any, name: str | None = None) -> Iterator[bytes]:
    """One event of large content, in pieces."""
    yield _opening(name)
    yield from pieces(content)
    yield b"\n\n"


def _opening(name: str | None) -> bytes:
    return b"data: " if name is None else b"event: %b\ndata: " % name.encode()


async def stream(source: PieceSource[Piece], script: Script[Piece], call: Call, settings: Settings) -> Response:
    """The response that streams `source`. Waits for its first piece, or raises its error."""
    try:
        first = await source.take(settings.stream_heartbeat_s, settings.stream_interval_s)
    except BaseException:  # also CancelledError, if the client disconnects
        source.close()
        raise
    return EventStream(source, script, first, call, settings)


class EventStream(Response):
    """Sends the pieces of a source as the events of a script."""

    def __init__(self, source: PieceSource[Any], script: Script[Any], first: Sequence[Any], call: Call, settings: Settings) -> None:
        super().__init__(headers={**call.headers, **_HEADERS})
        del self.headers["content-length"]
        self._source, self._script, self._first, self._call, self._settings = source, script, first, call, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout = _WriteTimeout(self._settings.stream_stall_s)
        try:
            await timeout.wait(send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}))
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await timeout.wait(send({"type": "http.response.body", "body": chunk, "more_body": True}))
            await timeout.wait(send({"type": "http.response.body", "body": b""}))
        finally:
            timeout.end()
            self._source.close()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """The bytes of each write: all events that are ready at that time."""
        try:
            opening, events = self._script.opening(), self._script.pieces(self._first)
            if isinstance(events, bytes):
                yield opening + events or PING
            else:
                async for chunk in _gathered(chain((opening,), events)):
                    yield chunk
            while not self._source.done:
                pieces = await self._source.take(self._settings.stream_heartbeat_s, self._settings.stream_interval_s)
                events = self._script.pieces(pieces) if pieces else PING
                if not isinstance(events, bytes):
                    async for chunk in _gathered(events):
                        yield chunk
                elif events:
                    yield events
            events = self._script.closing()
            if isinstance(events, bytes):
                yield events
            else:
                async for chunk in _gathered(events):
                    yield chunk
            return
        except ServiceError as error:
            last = self._script.failure(error)
        except Exception:
            log.exception("unexpected error", extra=self._call.identity)
            last = self._script.failure(ServiceError("internal error; the log has it under this request's id"))
        yield last


async def _gathered(events: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Join bytes to chunks of about `PIECE_BYTES`, and let other tasks run in between."""
    chunk, size = [], 0
    async for written in in_slices(events):
        chunk.append(written)
        size += len(written)
        if size >= PIECE_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if size:
        yield b"".join(chunk)


class _WriteTimeout:
    """A limit on how long one write may take."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._task = asyncio.current_task()
        self._timer = ResettableTimer(self._expire)
        self._expired = False

    async def wait(self, write: Awaitable[None]) -> None:
        """Await the write. Raises ClientGone if it takes longer than the limit."""
        self._timer.set(self._limit_s)
        try:
            await write
        except asyncio.CancelledError:
            if not self._expired or self._task is None:
                raise
            self._task.uncancel()
            raise ClientGone from None
        finally:
            self._timer.clear()

    def end(self) -> None:
        self._timer.stop()

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()
