"""Large answers: bounded before they are computed, and written in pieces.

JSON of megabytes in one call would hold the event loop, and all of it would wait in memory for its client. A piece is made when the client
has taken the one before, so that an answer holds little more than the numbers it is made of.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.call import Call
from service.errors import NeverFits
from service.shares import Shares

LARGE_BYTES = 262_144  # an answer that is estimated at more is written in pieces
NUMBER_BYTES = 12  # of a float32 in JSON, with its comma
_PIECE_BYTES = 65_536
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def expect(call: Call, size_bytes: float, limit: int, shares: Shares, what: str) -> None:
    """An answer of about so many bytes more: NeverFits over the limit, Overloaded where large ones that are not taken fill their share.

    `what` it is made of, with the numbers.
    """
    size = int(size_bytes)
    if call.answer_bytes + size > limit:
        raise NeverFits(
            f"the answer would have about {call.answer_bytes + size} bytes ({what}), and the most is {limit}: ask for it in parts"
        )
    if size > LARGE_BYTES or call.answer_bytes:
        shares.take(call.host, size, call.answer_bytes)
        call.answer_bytes += size


def pieces(content: Any) -> Iterator[bytes]:
    """The JSON of `content`, with numpy arrays and iterators anywhere in it, in pieces: joined, what orjson writes."""
    held = bytearray()
    for part in _parts(content):
        held += part
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, dict) and any(isinstance(value, list | dict | np.ndarray | Iterator) for value in content.values()):
        mark = b"{"
        for key, value in content.items():
            yield mark + orjson.dumps(key) + b":"
            yield from _parts(value)
            mark = b","
        yield b"{}" if mark == b"{" else b"}"
    elif isinstance(content, Iterator):
        mark = b"["
        for each in content:
            yield mark + orjson.dumps(each, option=_OPTIONS)
            mark = b","
        yield b"[]" if mark == b"[" else b"]"
    elif isinstance(content, list) or (isinstance(content, np.ndarray) and content.ndim):
        yield from _elements(content)
    else:
        yield orjson.dumps(content, option=_OPTIONS)


def _elements(content: Any) -> Iterator[bytes]:
    """So many of a list at once as make a piece, by what the ones before took; one that is more than a piece by itself in pieces."""
    count, mark = 1, b"["
    at = 0
    while at < len(content):
        if _is_large(content[at]):
            yield mark
            yield from _parts(content[at])
            at += 1
        else:
            some = content[at : at + count]
            stop = next((i for i, each in enumerate(some) if i and _is_large(each)), len(some)) if isinstance(content, list) else len(some)
            some = some[:stop]
            if isinstance(some, np.ndarray) and not some.flags.c_contiguous:
                some = np.ascontiguousarray(some)
            part = orjson.dumps(some, option=_OPTIONS)
            yield mark + part[1:-1]
            at += stop
            if len(part) < _PIECE_BYTES // 2:
                count *= 2
            elif len(part) > _PIECE_BYTES:
                count = max(count // 2, 1)
        mark = b","
    yield b"[]" if mark == b"[" else b"]"


def _is_large(element: Any) -> bool:
    if isinstance(element, np.ndarray):
        return element.size * NUMBER_BYTES > _PIECE_BYTES
    if isinstance(element, dict):
        return any(map(_is_large, element.values()))
    return isinstance(element, Iterator) or (isinstance(element, list) and len(element) > _PIECE_BYTES // NUMBER_BYTES)


class JsonPieces(Response):
    """An answer whose JSON is made as its client takes it."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int, headers: dict[str, str]) -> None:
        super().__init__(b"", status, headers)
        del self.headers["content-length"]
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in pieces(self._content):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # others have their turn also where the client takes everything at once
        await send({"type": "http.response.body", "body": b""})
