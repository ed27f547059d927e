"""An order in which clients share fairly what serves them one after the other.

Each client's work is laid end to end, from the moment at which it came, and what would end first if all clients were served side by side is
next: small work passes large work, and no client waits for what another one sends without end. (Self-clocked fair queueing: Golestani,
INFOCOM 1994.)
"""

_MOST_REMEMBERED = 256


class FairOrder:
    """Gives tags: what has the smallest is next. Not thread-safe."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of each client, its last tag
        self._prune_at = _MOST_REMEMBERED

    def tag(self, client: str, size: float) -> float:
        """Of work of that size that comes now."""
        tag = self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + size
        return tag

    def served(self, tag: float) -> None:
        """What has this tag was taken."""
        self._now = max(self._now, tag)
        if len(self._ends) > self._prune_at:  # who has nothing waiting is as good as new
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
            self._prune_at = max(_MOST_REMEMBERED, 2 * len(self._ends))
