"""A cache of computed outputs, bounded in bytes. The least recently used one is removed first."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from service.runtime.lru import Lru
from service.runtime.onnx import Array

_ENTRY_BYTES = 300  # bytes of an entry besides the row's numbers: dictionary entry, key and array header


def keys_of(
    tenant: str, fingerprint: str, outputs: Sequence[str], ids: list[int], type_ids: list[int] | None, unattended: int = 0
) -> tuple[bytes, ...]:
    """Return, for each output, a hash of everything that it depends on: the model's bytes, the graph's output, token ids,
    token types, and how many of the last tokens are not attended to.

    The tenant is in the key because a fast answer would reveal that another tenant has sent the same text.

    The requested dimensions and number format are not in the key, because they are applied to the cached row afterwards.
    """
    content = np.array(ids, np.int32).tobytes() + (b"" if type_ids is None else bytes(type_ids))
    head = f"{tenant} {fingerprint} {unattended} "
    return tuple([blake2b(f"{head}{output} ".encode() + content, digest_size=16).digest() for output in outputs])


class VectorCache(Lru[bytes, Array]):
    """The outputs of texts. Used on the event loop only."""

    def all(self, keys: tuple[bytes, ...]) -> tuple[Array, ...] | None:
        """Return the outputs of a text, or None unless all of them are here."""
        found = tuple([array for key in keys if (array := self.get(key)) is not None])
        return found if len(found) == len(keys) else None

    def add(self, key: bytes, array: Array) -> None:
        """Add an output. The array must own its memory, because a view would keep the memory of its whole batch."""
        self.put(key, array, array.nbytes + _ENTRY_BYTES)
