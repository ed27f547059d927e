"""Converts states of one decoder to the bytes that the store keeps, and back."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from export import contract
from service.errors import InvalidRequest
from service.generation.state import State
from service.states.blob import MOST_RECENT, Blob, pack, unpack

_SEAL = 16  # bytes of a checksum


class Packing:
    """Converts the states of one decoder. `fingerprint` identifies the bundle, and `numerics` the arithmetic of this machine."""

    def __init__(self, decoder: contract.Decoder, *, vocab_size: int, fingerprint: str, numerics: str) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.numerics = numerics

    @property
    def most_bytes(self) -> int:
        """Return the approximate size of a state in memory, in bytes."""
        return self._decoder.state_bytes + 4 * self._vocab_size

    def whole(self, state: State, origin: State | None, fed: Sequence[int]) -> State:
        """Return `state` with its fields `seen` and `recent` set. It results from feeding the tokens `fed` to `origin` (None: the empty
        state).
        """
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[np.array(fed, np.int64)] = True
        seen, recent = np.packbits(bits, bitorder="little"), tuple(fed[-MOST_RECENT:])
        if origin is not None:
            seen = seen if origin.seen is None else seen | origin.seen
            recent = (*origin.recent, *recent)[-MOST_RECENT:]
        return replace(state, seen=seen, recent=recent)

    def pack(self, state: State, *, id: str, model: str, parent: str | None, created: float) -> bytes:
        """Return the bytes of a state that was returned by `whole`."""
        assert state.logits is not None
        assert state.seen is not None
        blob = Blob(
            tensors=state.tensors,
            logits=state.logits,
            seen=state.seen,
            recent=state.recent,
            position=state.position,
            model=model,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            id=id,
            parent=parent,
            created=created,
        )
        return pack(blob, [tensor.name for tensor in self._decoder.states])

    def unpack(self, packed: bytes) -> State:
        """Return the state that `pack` has converted to bytes. Raises InvalidRequest if the bytes are not a state of this decoder."""
        blob = unpack(packed, self._decoder, self._vocab_size, self.fingerprint)
        return State(
            tensors=blob.tensors,
            position=blob.position,
            logits=blob.logits,
            fingerprint=blob.fingerprint,
            seen=blob.seen,
            recent=blob.recent,
        )

    def seal(self, id: str, state: State, created: float) -> bytes:
        """Return the bytes of a state that is stored as a document. They begin with a checksum, because the store itself checks only states
        and not documents.
        """
        packed = self.pack(state, id=id, model="document", parent=None, created=created)
        return blake2b(packed, digest_size=_SEAL).digest() + packed

    def unseal(self, sealed: bytes) -> State:
        """Return the state that `seal` has converted to bytes. Raises InvalidRequest if the bytes have changed, or are not a state of this
        decoder.
        """
        seal, packed = sealed[:_SEAL], sealed[_SEAL:]
        if blake2b(packed, digest_size=_SEAL).digest() != seal:
            raise InvalidRequest("the bytes of a stored state have changed")
        return self.unpack(packed)
