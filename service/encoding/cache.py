"""Vectors that were computed before, bounded in bytes, least recently used first out."""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from service.runtime.onnx import Array

_ENTRY_BYTES = 300  # what the dictionary, the key and the array header take beside the numbers


def key_of(fingerprint: str, output: str, ids: list[int], type_ids: list[int] | None) -> bytes:
    """Equal keys, equal rows: model bytes, graph output (which settles pooling and normalisation) and ids (which settle prompt and cut).

    Dimensions and number type are not part of it, because they are cheap to take from the row.
    """
    digest = blake2b(f"{fingerprint} {output} ".encode(), digest_size=16)
    digest.update(np.array(ids, np.int32).tobytes())
    if type_ids is not None:
        digest.update(bytes(type_ids))
    return digest.digest()


class VectorCache:
    """Used on the event loop alone."""

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
        """Keeps `row` as it is: it must own its memory, or the whole batch it is cut from stays alive."""
        cost = row.nbytes + _ENTRY_BYTES
        if cost > self.max_bytes or key in self._rows:
            return
        self._rows[key] = row
        self.size_bytes += cost
        while self.size_bytes > self.max_bytes:
            _, old = self._rows.popitem(last=False)
            self.size_bytes -= old.nbytes + _ENTRY_BYTES
