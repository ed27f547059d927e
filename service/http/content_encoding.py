"""Compressed request bodies (RFC 9110, section 8.4.1): gzip and deflate, decompressed in pieces so that their size can be bounded."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from service.errors import MalformedBody, UnsupportedEncoding

ACCEPTED = "gzip, deflate"
_PIECE_BYTES = 1024 * 1024  # most bytes that one call returns, which takes a few milliseconds
_INLINE_BYTES = 64 * 1024  # up to this size, decompressing is faster than switching to another thread
_INPUT_BYTES = 256 * 1024  # most input bytes of one zlib call, because zlib copies all unread input
_MOST_MEMBERS = 100  # most members in a gzip body, because an empty member takes long to decompress for its size
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


async def inflate(coding: str, body: bytes) -> AsyncIterator[bytes]:
    """Yield the decompressed content in pieces of up to 1 MiB. If the body has at most 64 KiB, the event loop decompresses the first 64 KiB
    of the content. Another thread decompresses all other pieces.

    Raises UnsupportedEncoding for another coding, MalformedBody for a body that is invalid in its coding or ends early.
    """
    name = coding.strip().lower()
    if name in ("", "identity") or not body:
        yield body
        return
    if name not in ("gzip", "x-gzip", "deflate"):
        raise UnsupportedEncoding(
            f"content-encoding {coding[:80]!r} is not accepted: send the body as it is, or with one of {ACCEPTED}", param="content-encoding"
        )
    inflater = _Inflater(name, body)
    try:
        if len(body) <= _INLINE_BYTES:
            yield inflater.take(_INLINE_BYTES)
        while not inflater.done:
            yield await asyncio.to_thread(inflater.take, _PIECE_BYTES)
    except zlib.error as error:
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


def _has_zlib_header(body: bytes) -> bool:
    """Return whether `body` begins with a zlib header (RFC 1950, section 2.2): method 8, first two bytes a multiple of 31."""
    return len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
