"""A cache of computed outputs, bounded in bytes. The least recently used one is removed first."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from service.runtime.onnx import Array

_ENTRY_BYTES = 300  # bytes of an entry besides the row's numbers: dictionary entry, key and array header


def keys_of(tenant: str, fingerprint: str, outputs: Sequence[str], ids: list[int], type_ids: list[int] | None) -> tuple[bytes, ...]:
    """Return, for each output, a hash of everything that it depends on: the model's bytes, the graph's output, token ids and token types.

    The tenant is in the key because a fast answer would reveal that another tenant has sent the same text.

    The requested dimensions and number format are not in the key, because they are applied to the cached row afterwards.
    """
    content = np.array(ids, np.int32).tobytes() + (b"" if type_ids is None else bytes(type_ids))
    head = f"{tenant} {fingerprint} "
    return tuple([blake2b(f"{head}{output} ".encode() + content, digest_size=16).digest() for output in outputs])


class VectorCache:
    """An LRU cache of the outputs of texts. Used on the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._arrays: OrderedDict[bytes, Array] = OrderedDict()

    def __len__(self) -> int:
        return len(self._arrays)

    def get(self, keys: tuple[bytes, ...]) -> tuple[Array, ...] | None:
        """Return the outputs of a text, or None unless all of them are here."""
        found = []
        for key in keys:
            if (array := self._arrays.get(key)) is None:
                return None
            found.append(array)
        for key in keys:
            self._arrays.move_to_end(key)
        return tuple(found)

    def put(self, key: bytes, array: Array) -> None:
        """Add an output. The array must own its memory, because a view would keep the memory of its whole batch."""
        cost = array.nbytes + _ENTRY_BYTES
        if cost > self.max_bytes or key in self._arrays:
            return
        self._arrays[key] = array
        self.size_bytes += cost
        while self.size_bytes > self.max_bytes:
            _, old = self._arrays.popitem(last=False)
            self.size_bytes -= old.nbytes + _ENTRY_BYTES
