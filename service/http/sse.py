"""Server-sent events: streams an answer while it is generated.

Events have the format of the HTML standard, section 9.2: `data: {json}` and an empty line. Comments begin with a colon. An error
that occurs before the first piece or heartbeat is sent determines the HTTP status. Later the status is already sent, so the error is
the last event of the stream, in the dialect's format. Therefore a client can distinguish a failed stream from a complete one.

The events of a stream that can be continued have ids (`service/streams/`). OpenAI's client parses the data of every event, also of one
that has only an id. Therefore the first id and the comments have no empty line of their own: they become part of the next event.

When many streams are open, each sends larger messages less often (`service/runtime/pacing.py`).

A slow client delays only its own stream. Its unread pieces are joined into one, so memory is bounded by the length of the
completion. A client that reads nothing for `stream_stall_s` is treated as disconnected. The generation is cancelled when the
stream ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from secrets import token_hex
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.call import Call
from service.errors import DocumentMoved, ServiceError
from service.http.answers import PIECE_BYTES, in_slices, pieces, whole
from service.http.interrupts import ClientGone, Interruptible
from service.runtime.pacing import Pace
from service.settings import Settings

log = logging.getLogger("attnserve")

PING = b": ping\n"
RETRY = b"retry: 1000\n"  # tells clients how many milliseconds after a lost connection to connect again
DONE = b"data: [DONE]\n\n"
_PADDED_BYTES = 64
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

_PACE = Pace()  # of all streams of this process

Piece = TypeVar("Piece")
Taken = TypeVar("Taken", covariant=True)
Told = TypeVar("Told", contravariant=True)
Written = bytes | Iterator[bytes]


class PieceSource(Protocol[Taken]):
    """A source of the pieces of an answer while it is generated."""

    @property
    def done(self) -> bool:
        """Return whether `take` has returned all pieces."""

    async def take(self, timeout_s: float, interval_s: float) -> Sequence[Taken]:
        """Return the pieces since the previous call. Waits up to `timeout_s` for the first piece. Raises the source's error.

        If less than `interval_s` seconds have passed since the previous call, it may wait for the rest of this interval to gather pieces.
        """

    def close(self) -> None:
        """Cancel the generation. Further calls have no effect."""


class Owner(Protocol):
    """The right of this process to send a stream, which another process may take over."""

    on_loss: Callable[[], None]  # called when another process has taken the stream over

    async def holds(self) -> bool:
        """Return whether this process may still send the stream."""
        ...


class Script(Protocol[Told]):
    """Converts pieces of an answer to the events of a dialect: `opening` before all pieces, `closing` after them, `failure` for an error.

    Events are bytes, or an iterator over bytes if they are large. b"" means no event.
    """

    def opening(self) -> bytes:
        return b""

    def pieces(self, pieces: Sequence[Told]) -> Written: ...

    def closing(self) -> Written:
        return b""

    def failure(self, error: ServiceError) -> bytes: ...


def event(content: Any, name: str | None = None) -> bytes:
    """Return one event with the JSON of `content`, which should be small. `name`: the event's type, if the dialect has several types."""
    return b"".join((_opening(name), whole(content), b"\n\n"))


def padded(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with OpenAI's field `obfuscation`: random characters that fill its JSON up to a multiple of `_PADDED_BYTES`."""
    size = len(whole({**content, "obfuscation": ""}))
    return {**content, "obfuscation": token_hex(_PADDED_BYTES // 2)[: -size % _PADDED_BYTES]}


def event_pieces(content: Any, name: str | None = None) -> Iterator[bytes]:
    """Yield one event with the JSON of `content` in pieces, for content that is too large for `event`."""
    yield _opening(name)
    yield from pieces(content)
    yield b"\n\n"


def _opening(name: str | None) -> bytes:
    return b"data: " if name is None else b"event: %b\ndata: " % name.encode()


async def stream(source: PieceSource[Piece], script: Script[Piece], call: Call, settings: Settings) -> Response:
    """Return a response that streams `source`, after the first piece or heartbeat. Raises an error that occurs before that."""
    return EventStream(source, script, await first_pieces(source, settings), call, settings)


async def first_pieces(source: PieceSource[Piece], settings: Settings) -> Sequence[Piece]:
    """Return the first pieces, or no piece if the first heartbeat is due earlier. If an error occurs, close the source and raise it."""
    try:
        return await source.take(settings.stream_heartbeat_s, settings.stream_interval_s)
    except BaseException:  # catches CancelledError too, which is raised if the client disconnects
        source.close()
        raise


class EventStream(Response):
    """A response that formats the pieces of `source` as events with `script`, and sends them.

    `priming` is sent first. `owner`: the right to send the stream, if another process may take it over. Once the right is lost, nothing
    more is sent, and the connection is closed. If it is lost before the response begins, calling the response raises DocumentMoved.
    """

    def __init__(
        self,
        source: PieceSource[Any],
        script: Script[Any],
        first: Sequence[Any],
        call: Call,
        settings: Settings,
        *,
        priming: bytes = b"",
        owner: Owner | None = None,
    ) -> None:
        super().__init__(headers={**call.headers, **_HEADERS})
        del self.headers["content-length"]
        self._source, self._script, self._first, self._call, self._settings = source, script, first, call, settings
        self._priming, self._owner = priming, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _PACE.stream(), Interruptible(ClientGone) as interrupt:
            loop, owner = asyncio.get_running_loop(), self._owner

            async def write(message: Message) -> None:
                if owner is not None and not await owner.holds():
                    raise ClientGone
                stalled = loop.call_later(self._settings.stream_stall_s, interrupt)
                try:
                    await send(message)
                finally:
                    stalled.cancel()

            try:
                if owner is not None:
                    if not await owner.holds():
                        raise DocumentMoved("another connection has begun to read this stream: read it there, or send the request again")
                    owner.on_loss = interrupt
                await write({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with aclosing(self._chunks()) as chunks:
                    async for chunk in chunks:
                        await write({"type": "http.response.body", "body": chunk, "more_body": True})
                await write({"type": "http.response.body", "body": b""})
            finally:
                self._source.close()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of each write: all events that are ready at that time."""
        try:
            opening, first = self._script.opening(), self._script.pieces(self._first) if self._first else b""
            if isinstance(first, bytes):
                events: Written = self._priming + (opening + first or PING)
            else:
                events = chain((self._priming + opening,), first)
            async for chunk in _joined_chunks(events):
                yield chunk
            while not self._source.done:
                interval_s = _PACE.interval_s(self._settings.stream_interval_s)
                pieces = await self._source.take(self._settings.stream_heartbeat_s, interval_s)
                async for chunk in _joined_chunks(self._script.pieces(pieces) if pieces else PING):
                    yield chunk
            async for chunk in _joined_chunks(self._script.closing()):
                yield chunk
            return
        except ServiceError as error:
            last = self._script.failure(error)
        except Exception:
            log.exception("unexpected error", extra=self._call.identity)
            last = self._script.failure(ServiceError("internal error; the log has it under this request's id"))
        yield last


async def _joined_chunks(events: Written) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of `events` joined to chunks of about `PIECE_BYTES` bytes. Lets other tasks run between chunks."""
    if isinstance(events, bytes):
        if events:
            yield events
        return
    chunk, size = [], 0
    async for written in in_slices(events):
        chunk.append(written)
        size += len(written)
        if size >= PIECE_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if size:
        yield b"".join(chunk)
