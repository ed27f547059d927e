"""Compressed bodies of requests and answers (RFC 9110, section 8.4.1).

Those of requests are gzip, deflate or zstd, decompressed in pieces so that their size can be bounded. Large answers are compressed if the
client takes zstd or gzip. Streams are not: a compressor would hold events back until it has enough of them.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import zstandard

from service.errors import MalformedBody, UnsupportedEncoding

ACCEPTED = "gzip, deflate, zstd"
LEAST_BYTES = 16_384  # a shorter answer fits into the first packets of a connection (RFC 6928), so compressing it saves no round trip
_OFFERED = ("zstd", "gzip")  # of answers; if a client takes both, zstd, which needs less time
# Content types that are compressed.
_TEXTS = (b"application/json", b"text/plain", b"text/javascript", b"text/css", b"application/openmetrics-text")
_UNCHANGED = {b"content-encoding", b"content-range"}  # an answer with one of these, or with a strong etag, is tied to its exact bytes
_WEIGHT = re.compile(r"\s*q=(\d(?:\.\d{1,3})?)\s*")
_COMPRESSED_BYTES = 65_536  # most bytes that one call compresses, which takes about a millisecond
_WINDOW_BYTES = 8 * 1024 * 1024  # most memory that a zstd frame may ask for (RFC 9659)
_PIECE_BYTES = 1024 * 1024  # most bytes that one call returns, which takes a few milliseconds
_INLINE_BYTES = 64 * 1024  # up to this size, decompressing is faster than switching to another thread
_INPUT_BYTES = 256 * 1024  # most input bytes of one zlib call, because zlib copies all unread input
_MOST_MEMBERS = 100  # most members in a gzip body, because an empty member takes long to decompress for its size
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def inflate(coding: str, body: bytes) -> AsyncIterator[bytes]:
    """Yield the decompressed content in pieces of up to 1 MiB. If the body has at most 64 KiB, the event loop decompresses the first 64 KiB
    of the content. Another thread decompresses all other pieces.

    Raises UnsupportedEncoding for another coding, MalformedBody for a body that is invalid in its coding or ends early. An early end of
    a zstd body whose head does not tell the size is not noticed: the content is then incomplete.
    """
    name = coding.strip().lower()
    if name in ("", "identity") or not body:
        yield body
        return
    if name not in ("gzip", "x-gzip", "deflate", "zstd"):
        raise UnsupportedEncoding(
            f"content-encoding {coding[:80]!r} is not accepted: send the body as it is, or with one of {ACCEPTED}", param="content-encoding"
        )
    try:
        inflater = _ZstdInflater(body) if name == "zstd" else _Inflater(name, body)
        if len(body) <= _INLINE_BYTES:
            yield inflater.take(_INLINE_BYTES)
        while not inflater.done:
            yield await asyncio.to_thread(inflater.take, _PIECE_BYTES)
    except (zlib.error, zstandard.ZstdError) as error:
        raise MalformedBody(f"the body is not {name}, as its content-encoding says: {error}", param="content-encoding") from None


class _Inflater:
    """A decompressor with a compressed body and the position in the body. Only one thread at a time may use it."""

    def __init__(self, name: str, body: bytes) -> None:
        self.done = False
        self._name = name
        self._body = memoryview(body)
        self._at = 0
        self._members = 1
        self._wbits = _ZLIB if name == "deflate" else _GZIP
        if name == "deflate" and not _has_zlib_header(body):  # raw DEFLATE data (RFC 1951), which some clients send
            self._wbits = _RAW
        self._stream = zlib.decompressobj(self._wbits)

    def take(self, most: int) -> bytes:
        """Return the next `most` bytes of the content, or fewer at its end. Raises zlib.error if the body is invalid."""
        pieces: list[bytes] = []
        while most > 0 and not self.done:
            given = self._stream.unconsumed_tail or self._read()
            piece = self._stream.decompress(given, most)
            pieces.append(piece)
            most -= len(piece)
            if self._stream.eof:
                self._next_member()
            elif not given and not piece:
                raise zlib.error("it ends too early")
        return b"".join(pieces)

    def _read(self) -> bytes:
        given = bytes(self._body[self._at : self._at + _INPUT_BYTES])
        self._at += len(given)
        return given

    def _next_member(self) -> None:
        """Begin the next member of a gzip body, or finish at the end of the body. Only gzip bodies can have several members."""
        self._at -= len(self._stream.unused_data)
        if self._at == len(self._body):
            self.done = True
        elif self._wbits != _GZIP:
            raise zlib.error("there are bytes after its end")
        elif self._members == _MOST_MEMBERS:
            raise zlib.error(f"it has more than {_MOST_MEMBERS} members")
        else:
            self._members += 1
            self._stream = zlib.decompressobj(self._wbits)


class _ZstdInflater:
    """The same for zstd. Empty frames need no limit, because they are decompressed fast. Raises ZstdError if the body's head is invalid."""

    def __init__(self, body: bytes) -> None:
        self.done = False
        self._missing = zstandard.frame_content_size(body)  # bytes that the first frame still has; -1 if its head does not tell
        self._stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(body, read_across_frames=True)

    def take(self, most: int) -> bytes:
        """Return the next `most` bytes of the content, or fewer at its end. Raises ZstdError if the body is invalid."""
        piece = self._stream.read(most)
        self.done = len(piece) < most
        self._missing -= len(piece)
        if self.done and self._missing > 0:
            raise zstandard.ZstdError("it ends too early")
        return piece


def _has_zlib_header(body: bytes) -> bool:
    """Return whether `body` begins with a zlib header (RFC 1950, section 2.2): method 8, first two bytes a multiple of 31."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0


# Answers ---------------------------------------------------------------------------------------------------------------------------------


def coding_for(accept_encoding: str) -> str | None:
    """Return the coding for the answer to a request with this header, or None to send it as it is."""
    weights = {}
    for part in accept_encoding.lower().split(","):
        name, _, parameter = part.partition(";")
        weight = _WEIGHT.fullmatch(parameter)
        weights[name.strip()] = float(weight[1]) if weight else 1.0
    best = max(_OFFERED, key=lambda coding: weights.get(coding, weights.get("*", 0.0)))
    return best if weights.get(best, weights.get("*", 0.0)) else None


class CompressingSend:
    """An ASGI `send` that compresses a large answer if the header accept-encoding of its request allows it."""

    __slots__ = ("_accept_encoding", "_compressor", "_send")

    def __init__(self, send: Callable[[Any], Awaitable[None]], accept_encoding: str) -> None:
        self._send, self._accept_encoding = send, accept_encoding
        self._compressor: Any = None  # None if the answer is sent as it is

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if _is_compressible(headers):
                headers[b"vary"] = b", ".join(filter(None, (headers.get(b"vary"), b"accept-encoding")))
                if (coding := coding_for(self._accept_encoding)) is not None:
                    headers.pop(b"content-length", None)
                    headers[b"content-encoding"] = coding.encode()
                    self._compressor = (
                        zlib.compressobj(1, wbits=_GZIP) if coding == "gzip" else zstandard.ZstdCompressor(level=1).compressobj()
                    )
                message["headers"] = list(headers.items())
            await self._send(message)
        elif self._compressor is None:
            await self._send(message)
        else:
            await self._compress(message.get("body", b""), ended=not message.get("more_body"))

    async def _compress(self, body: bytes, *, ended: bool) -> None:
        for at in range(0, len(body), _COMPRESSED_BYTES):
            if piece := self._compressor.compress(body[at : at + _COMPRESSED_BYTES]):
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        if ended:
            await self._send({"type": "http.response.body", "body": self._compressor.flush()})


def _is_compressible(headers: MutableMapping[bytes, bytes]) -> bool:
    """Return whether an answer is text whose length is unknown, because it is sent in pieces, or at least `LEAST_BYTES`."""
    if not headers.get(b"content-type", b"").startswith(_TEXTS) or not _UNCHANGED.isdisjoint(headers):
        return False
    if not headers.get(b"etag", b"W/").startswith(b"W/"):
        return False
    return int(headers.get(b"content-length", LEAST_BYTES)) >= LEAST_BYTES
