"""Fair queueing: an order in which clients share a server that handles one piece of work at a time.

Next is the work that would finish first if all clients were served in parallel, each client's own work one after the other. So small work
passes large work, and a client that sends without end does not block the others. (Self-clocked fair queueing: Golestani,
INFOCOM 1994.)

If turns have a size, clients are served one after the other: each gets a turn of so much work, and work of the same turn is served in order
of arrival. So the first of several large requests ends early, instead of all of them at the end.
"""

import math

_MOST_REMEMBERED = 256


class FairOrder:
    """Gives tags: the work with the smallest tag is next. Not thread-safe."""

    def __init__(self, turn: float = 0.0) -> None:
        """`turn`: its size, in the unit of `tag`'s sizes. 0: a turn is a piece of work."""
        self._turn = turn
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of each client, its last tag
        self._prune_at = _MOST_REMEMBERED

    def tag(self, client: str, size: float) -> float:
        """The tag of work of that size that arrives now."""
        end = self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + size
        return math.ceil(end / self._turn) * self._turn if self._turn else end

    def served(self, tag: float) -> None:
        """Note that the work with this tag was taken."""
        self._now = max(self._now, tag)
        if len(self._ends) > self._prune_at:  # a client without waiting work needs no entry
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
            self._prune_at = max(_MOST_REMEMBERED, 2 * len(self._ends))
