"""JSON that is written piece by piece: parts of an answer that are large become bytes as they come into being, between other work.

What writes them holds the event loop for a slice at a time (`in_slices`), and they leave as they are, never as one text in memory twice.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE_S = 0.002  # how long writing may hold the event loop
CHUNK_BYTES = 65_536  # sent at a time
_MARK = secrets.token_hex(16)  # where a part belongs in its surroundings; no text can have it
_QUOTED_MARK = b'"%b"' % _MARK.encode()


Made = TypeVar("Made")


class Part:
    """A value of an answer that is written already."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def pieces(self) -> list[bytes]:
        return self._pieces


class Text(Part):
    """A string, as its beginning, middle and end come."""

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(orjson.dumps(text)[1:-1])

    @property
    def pieces(self) -> list[bytes]:
        return [b'"', *self._pieces, b'"']


class Elements(Part):
    """A list, as its elements come."""

    def add(self, written: bytes) -> None:
        """One or several elements with commas between them; b"" for none."""
        if written:
            self._pieces.append(b",%b" % written if self._pieces else written)

    def add_all(self, others: "Elements") -> None:
        """Those of another list, which are not copied."""
        if others._pieces:
            if self._pieces:
                self._pieces.append(b",")
            self._pieces += others._pieces

    @property
    def pieces(self) -> list[bytes]:
        return [b"[", *self._pieces, b"]"]


def elements(written: bytes) -> Elements:
    """A list of these elements."""
    made = Elements()
    made.add(written)
    return made


def pieces_of(content: Any) -> list[bytes]:
    """`content` as JSON. Parts, anywhere in it, stay in their pieces."""
    parts: list[Part] = []

    def mark(value: Any) -> str:
        if not isinstance(value, Part):
            raise TypeError
        parts.append(value)
        return _MARK

    around = orjson.dumps(content, default=mark, option=orjson.OPT_SERIALIZE_NUMPY)
    if not parts:
        return [around]
    first, *others = around.split(_QUOTED_MARK)
    pieces = [first]
    for part, after in zip(parts, others, strict=True):
        pieces += part.pieces
        pieces.append(after)
    return pieces


async def in_slices(work: Iterable[Made]) -> AsyncIterator[Made]:
    """What `work` writes, with a turn for others whenever it has held the event loop for a slice."""
    until = time.perf_counter() + SLICE_S
    for written in work:
        yield written
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S


async def done(work: Iterable[object]) -> None:
    """All of `work`, whose steps write somewhere themselves."""
    async for _ in in_slices(work):
        pass


def json_answer(pieces: Sequence[bytes], headers: Mapping[str, str]) -> Response:
    """What `pieces_of` gave, as a response."""
    if sum(map(len, pieces)) <= CHUNK_BYTES:
        return Response(b"".join(pieces), headers=headers, media_type="application/json")
    return PiecesResponse(pieces, headers)


class PiecesResponse(Response):
    """A JSON answer in its pieces, sent chunk by chunk as the client takes them; what was sent is freed."""

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = list(reversed(pieces))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            chunk, size = [], 0
            while self._pieces and size < CHUNK_BYTES:
                piece = self._pieces.pop()
                chunk.append(piece)
                size += len(piece)
            await send({"type": "http.response.body", "body": b"".join(chunk), "more_body": True})
            await asyncio.sleep(0)  # a `send` that finds room does not
        await send({"type": "http.response.body", "body": b""})
