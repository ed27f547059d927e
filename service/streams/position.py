"""The position of a client in a stream, as the `id` of the stream's events.

An id is `RUN:POSITION:HASH`. POSITION has the number of tokens of each choice, joined with commas. A number is followed by `b` if the
choice has begun without a token (its role or its echoed prompt was sent), and by `e` if its last piece was sent. HASH is a hash of the
token ids of all choices up to POSITION. A client that continues a stream sends the last id that it received.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from service.errors import InvalidRequest

RUN = re.compile(r"run_[0-9a-f]{32}")
_ID = re.compile(r"(run_[0-9a-f]{32}):([0-9]{1,9}[be]?(?:,[0-9]{1,9}[be]?)*)(?::([0-9a-f]{16}))?")
_HASH_BYTES = 8
_SHOWN = 80  # an error message shows at most so many characters of an invalid id


class Place(NamedTuple):
    """The position in one choice: the number of tokens received, and whether the choice has begun and has ended."""

    tokens: int = 0
    begun: bool = False
    ended: bool = False

    @property
    def untouched(self) -> bool:
        """Return whether nothing of the choice was received."""
        return not (self.tokens or self.begun or self.ended)

    def __str__(self) -> str:
        return f"{self.tokens}{'e' if self.ended else 'b' if self.begun and not self.tokens else ''}"

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(int(text.rstrip("be")), text.endswith("b"), text.endswith("e"))


class EventId(NamedTuple):
    """The last event id that a client received, by the header or parameter `param`. If `hash` is None, its tokens are not compared."""

    run: str
    places: tuple[Place, ...]
    hash: str | None = None
    param: str = "run"

    @classmethod
    def parse(cls, text: str, param: str) -> Self:
        """Parse an id. Raises InvalidRequest that names `param`."""
        if (found := _ID.fullmatch(text)) is None:
            raise InvalidRequest(f"{param}={text[:_SHOWN]!r} is not the id of an event of a stream, run_ID:POSITION:HASH", param=param)
        return cls(found[1], tuple(map(Place.parse, found[2].split(","))), found[3], param)

    def __str__(self) -> str:
        return ":".join([self.run, ",".join(map(str, self.places)), *([] if self.hash is None else [self.hash])])


class Sent:
    """The position up to which the choices of a run were sent. Adding a token costs the same for any number of earlier tokens."""

    def __init__(self, run: str, choices: int) -> None:
        self.run = run
        self._places = [Place()] * choices
        self._hashes = [blake2b(digest_size=_HASH_BYTES) for _ in range(choices)]
        self._digests = [each.digest() for each in self._hashes]

    def add(self, index: int, token_ids: Sequence[int], *, ended: bool = False) -> None:
        """Note that these tokens of a choice are sent with the next event. `ended` is True if they are the choice's last tokens."""
        tokens, begun, _ = self._places[index]
        if token_ids:
            (hash_ := self._hashes[index]).update(np.array(token_ids, "<i4").tobytes())
            self._digests[index] = hash_.copy().digest()
        self._places[index] = Place(tokens + len(token_ids), begun, ended)

    def begin(self, index: int) -> None:
        """Note that the next event begins a choice and contains no token of it."""
        self._places[index] = self._places[index]._replace(begun=True)

    def restore(self, index: int, token_ids: Sequence[int], place: Place) -> None:
        """Note the tokens and the position of a choice that were sent before this stream was continued."""
        begun = self._places[index].begun
        self.add(index, token_ids)
        self._places[index] = place._replace(begun=place.begun or begun)

    @property
    def hash(self) -> str:
        return blake2b(b"".join(self._digests), digest_size=_HASH_BYTES).hexdigest()

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._places)

    @property
    def line(self) -> bytes:
        """Return the line `id: ..` of the next event."""
        return b"id: %b\n" % str(EventId(self.run, self.places, self.hash)).encode()
