"""A cache of the most recently used values, bounded by their sizes."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """The most recently used values, whose sizes are at most `most` in total. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.size, self.most = 0, most
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with their sizes; least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        if (found := self._values.get(key)) is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int = 1) -> list[tuple[K, V]]:
        """Set a key's value, unless it is larger than the whole cache. Return the keys and values that were removed to make room."""
        removed: list[tuple[K, V]] = []
        if size > self.most:
            return removed
        if (before := self._values.pop(key, None)) is not None:
            self.size -= before[1]
        self._values[key] = value, size
        self.size += size
        while self.size > self.most:
            oldest, (old, old_size) = self._values.popitem(last=False)
            self.size -= old_size
            removed.append((oldest, old))
        return removed
