"""Writes answers as JSON, and large answers in pieces.

Serialising megabytes in one call would block the event loop, and the bytes would stay in memory until the client has read them.
Therefore a piece is serialised only when the previous one is sent. A value with generated tokens, a `Part`, is serialised while they are
generated.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.call import NUMBER_BYTES

PIECE_BYTES = 65_536
SLICE_S = 0.002  # longest time for which serialising may block the event loop, in seconds
_JSON = "application/json"
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY

Made = TypeVar("Made")


class Part:
    """A value of an answer, already serialised to JSON and kept as a list of pieces."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def pieces(self) -> list[bytes]:
        return self._pieces


class Text(Part):
    """A JSON string that grows by appending."""

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(orjson.dumps(text)[1:-1])

    @property
    def pieces(self) -> list[bytes]:
        return [b'"', *self._pieces, b'"']


class Elements(Part):
    """A JSON list that grows by appending."""

    def add(self, written: bytes) -> None:
        """Append one or several elements, serialised and separated by commas. b"" appends nothing."""
        if written:
            self._pieces.append(b",%b" % written if self._pieces else written)

    def add_all(self, others: "Elements") -> None:
        """Append all elements of another list without copying their bytes."""
        if others._pieces:
            if self._pieces:
                self._pieces.append(b",")
            self._pieces += others._pieces

    @property
    def pieces(self) -> list[bytes]:
        return [b"[", *self._pieces, b"]"]


def whole(content: Any) -> bytes:
    """Serialise `content` to JSON in one call, so `content` should be small. It may contain numpy arrays and `Part` objects."""
    return orjson.dumps(content, default=_joined, option=_OPTIONS)


def _joined(value: Any) -> orjson.Fragment:
    if not isinstance(value, Part):
        raise TypeError
    return orjson.Fragment(b"".join(value.pieces))


def pieces(content: Any) -> Iterator[bytes]:
    """Serialise `content` to JSON in pieces. An iterator becomes a list, and its elements are computed when they are written."""
    held = bytearray()
    for part in _parts(content):
        held += part
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, dict) and any(isinstance(value, list | dict | np.ndarray | Iterator | Part) for value in content.values()):
        mark = b"{"
        for key, value in content.items():
            yield mark + orjson.dumps(key) + b":"
            yield from _parts(value)
            mark = b","
        yield b"{}" if mark == b"{" else b"}"
    elif isinstance(content, Part):
        yield from content.pieces
    elif isinstance(content, Iterator):
        mark = b"["
        for each in content:
            yield mark + whole(each)
            mark = b","
        yield b"[]" if mark == b"[" else b"]"
    elif isinstance(content, list) or (isinstance(content, np.ndarray) and content.ndim):
        yield from _elements(content)
    else:
        yield whole(content)


def _elements(content: Any) -> Iterator[bytes]:
    """Serialise a list. Small elements are written together in one piece, each large element in pieces of its own."""
    count, mark = 1, b"["
    at = 0
    while at < len(content):
        if _is_large(content[at]):
            yield mark
            yield from _parts(content[at])
            at += 1
        else:
            some = content[at : at + count]
            if isinstance(some, np.ndarray):
                some = np.ascontiguousarray(some)
            else:
                some = some[: next((i for i, each in enumerate(some) if _is_large(each)), None)]
            part = whole(some)
            yield mark + part[1:-1]
            at += len(some)
            if len(part) < PIECE_BYTES // 2:
                count *= 2
            elif len(part) > PIECE_BYTES:
                count = max(count // 2, 1)
        mark = b","
    yield b"[]" if mark == b"[" else b"]"


def _is_large(element: Any) -> bool:
    if isinstance(element, np.ndarray):
        return element.size * NUMBER_BYTES > PIECE_BYTES
    if isinstance(element, dict):
        return any(map(_is_large, element.values()))
    if isinstance(element, list):
        return len(element) > PIECE_BYTES // NUMBER_BYTES or any(map(_is_large, element))
    return isinstance(element, Iterator | Part)


def json_answer(content: Any, headers: Mapping[str, str], status: int = 200) -> Response:
    """Return a JSON response that is sent whole if the JSON fits into one piece, otherwise piece by piece."""
    made = pieces(content)
    begin = next(made)
    more = next(made, None)
    if more is None:
        return Response(begin, status, headers, _JSON)
    return PiecesResponse(chain((begin, more), made), headers, status)


class WholeJson(Response):
    """A JSON response that is sent whole. It is made several times as fast as one of Starlette's."""

    def __init__(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            *((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()),
        ]


class PiecesResponse(Response):
    """A JSON response whose pieces are serialised while the client reads the response."""

    media_type = _JSON

    def __init__(self, made: Iterator[bytes], headers: Mapping[str, str], status: int = 200) -> None:
        super().__init__(b"", status, headers)
        del self.headers["content-length"]
        self._made = made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._made:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # lets other tasks run, because `send` does not while the socket's buffer has room
        await send({"type": "http.response.body", "body": b""})


async def in_slices(work: Iterable[Made]) -> AsyncIterator[Made]:
    """Yield the items of `work`. Lets other tasks run whenever `SLICE_S` seconds have passed."""
    until = time.perf_counter() + SLICE_S
    for made in work:
        yield made
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S


async def done(work: Iterable[object]) -> None:
    """Run `work` to its end, and discard its items. Lets other tasks run whenever `SLICE_S` seconds have passed."""
    async for _ in in_slices(work):
        pass
