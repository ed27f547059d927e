"""A cache of computed output rows, bounded in bytes. The least recently used row is removed first."""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from service.runtime.onnx import Array

_ENTRY_BYTES = 300  # bytes of an entry besides the row's numbers: dictionary entry, key and array header


def key_of(tenant: str, fingerprint: str, output: str, ids: list[int], type_ids: list[int] | None) -> bytes:
    """Return a hash of everything that a row depends on: the model's bytes, the graph's output, token ids and token types.

    The tenant is in the key because a fast answer would reveal that another tenant has sent the same text.

    The requested dimensions and number format are not in the key, because they are applied to the cached row afterwards.
    """
    digest = blake2b(f"{tenant} {fingerprint} {output} ".encode(), digest_size=16)
    digest.update(np.array(ids, np.int32).tobytes())
    if type_ids is not None:
        digest.update(bytes(type_ids))
    return digest.digest()


class VectorCache:
    """An LRU cache of rows. Used on the event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._rows: OrderedDict[bytes, Array] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: bytes) -> Array | None:
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: bytes, row: Array) -> None:
        """Add a row. The array must own its memory, because a view would keep the memory of its whole batch."""
        cost = row.nbytes + _ENTRY_BYTES
        if cost > self.max_bytes or key in self._rows:
            return
        self._rows[key] = row
        self.size_bytes += cost
        while self.size_bytes > self.max_bytes:
            _, old = self._rows.popitem(last=False)
            self.size_bytes -= old.nbytes + _ENTRY_BYTES
