"""Server-sent events: an answer that leaves piece by piece.

Framing is that of the HTML standard, section 9.2: `data: {json}`, an empty line, comments with a leading colon. What can be refused
before the first piece is refused with a status of its own, as long as that comes before the first heartbeat would; from then on the
status is sent, and an error is the stream's last event, in the dialect's form. A stream that broke never ends like a good one.

A slow client holds nothing back but its own stream: what it has not taken waits joined into one piece, so memory is bounded by the
length of its completion, and a client that takes nothing for `stream_stall_s` counts as gone. The work ends with the stream.
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
from service.runtime.timer import Alarm
from service.settings import Settings

log = logging.getLogger("attnserve")

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Piece = TypeVar("Piece")
Taken = TypeVar("Taken", covariant=True)
Told = TypeVar("Told", contravariant=True)
Written = bytes | Iterator[bytes]


class Source(Protocol[Taken]):
    """Where pieces come from."""

    @property
    def done(self) -> bool:
        """Nothing is left to take."""

    async def take(self, timeout_s: float, interval_s: float) -> Sequence[Taken]:
        """The pieces since the last call. Waits up to `timeout_s` for one. Raises the source's error.

        Pieces that arrive less than `interval_s` after the last call may wait that long for more.
        """

    def close(self) -> None:
        """End the work behind it, at once. Idempotent."""


class Script(Protocol[Told]):
    """How a dialect turns pieces into events. An empty result sends nothing; a long one comes as an iterator."""

    def opening(self) -> bytes: ...

    def pieces(self, pieces: Sequence[Told]) -> Written: ...

    def closing(self) -> Written: ...

    def failure(self, error: ServiceError) -> bytes: ...


def event(content: Any, name: str | None = None) -> bytes:
    """One event of small content; `name` is its type where a dialect has several."""
    return b"".join((_opening(name), whole(content), b"\n\n"))


def event_pieces(content: Any, name: str | None = None) -> Iterator[bytes]:
    """One event of large content, in pieces."""
    yield _opening(name)
    yield from pieces(content)
    yield b"\n\n"


def _opening(name: str | None) -> bytes:
    return b"data: " if name is None else b"event: %b\ndata: " % name.encode()


async def stream(source: Source[Piece], script: Script[Piece], call: Call, settings: Settings) -> Response:
    """The response that streams `source`. Waits for its first piece, and raises the error that comes in its place."""
    try:
        first = await source.take(settings.stream_heartbeat_s, settings.stream_interval_s)
    except BaseException:  # also the client that leaves
        source.close()
        raise
    return EventStream(source, script, first, call, settings)


class EventStream(Response):
    """Sends the pieces of a source as the events of a script."""

    def __init__(self, source: Source[Any], script: Script[Any], first: Sequence[Any], call: Call, settings: Settings) -> None:
        super().__init__(headers={**call.headers, **_HEADERS})
        del self.headers["content-length"]
        self._source, self._script, self._first, self._call, self._settings = source, script, first, call, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = _Patience(self._settings.stream_stall_s)
        try:
            await writing.wait(send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}))
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await writing.wait(send({"type": "http.response.body", "body": chunk, "more_body": True}))
            await writing.wait(send({"type": "http.response.body", "body": b""}))
        finally:
            writing.end()
            self._source.close()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """What is written at once, one after the other: all events that are ready together."""
        try:
            opening, said = self._script.opening(), self._script.pieces(self._first)
            if isinstance(said, bytes):
                yield opening + said or PING
            else:
                async for chunk in _gathered(chain((opening,), said)):
                    yield chunk
            while not self._source.done:
                pieces = await self._source.take(self._settings.stream_heartbeat_s, self._settings.stream_interval_s)
                said = self._script.pieces(pieces) if pieces else PING
                if not isinstance(said, bytes):
                    async for chunk in _gathered(said):
                        yield chunk
                elif said:
                    yield said
            said = self._script.closing()
            if isinstance(said, bytes):
                yield said
            else:
                async for chunk in _gathered(said):
                    yield chunk
            return
        except ServiceError as error:
            last = self._script.failure(error)
        except Exception:
            log.exception("unexpected error", extra=self._call.identity)
            last = self._script.failure(ServiceError("internal error; the log has it under this request's id"))
        yield last


async def _gathered(said: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Join bytes to chunks of about `PIECE_BYTES`, and let other tasks run in between."""
    chunk, size = [], 0
    async for written in in_slices(said):
        chunk.append(written)
        size += len(written)
        if size >= PIECE_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if size:
        yield b"".join(chunk)


class _Patience:
    """A limit on how long one write may take."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._task = asyncio.current_task()
        self._alarm = Alarm(self._lose)
        self._lost = False

    async def wait(self, write: Awaitable[None]) -> None:
        """The write, or ClientGone when it takes longer than that."""
        self._alarm.set(self._limit_s)
        try:
            await write
        except asyncio.CancelledError:
            if not self._lost or self._task is None:
                raise
            self._task.uncancel()
            raise ClientGone from None
        finally:
            self._alarm.clear()

    def end(self) -> None:
        self._alarm.stop()

    def _lose(self) -> None:
        self._lost = True
        if self._task is not None:
            self._task.cancel()
