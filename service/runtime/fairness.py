"""Fair queueing: an order in which clients share a server that handles one piece of work at a time.

The next work is the one that would finish first if all clients were served in parallel, and the work of each client in sequence. So small
work passes large work, and a client that sends without pause does not block the others. (Self-clocked fair queueing: Golestani,
INFOCOM 1994.)

If a turn size is set, each client gets turns of so much work, and work of one turn is served in order of arrival. So of several large
requests the first ends early; without turns all would end at the same time.
"""

import math

_MOST_REMEMBERED = 256


class FairOrder:
    """Assigns a tag to each work: the smallest tag is next. Not thread-safe."""

    def __init__(self, turn: float = 0.0) -> None:
        """`turn`: the size of a turn, in the unit of `tag`'s sizes. 0: each work is a turn of its own."""
        self._turn = turn
        self._now = 0.0
        self._ends: dict[str, float] = {}  # by client: its last tag
        self._prune_at = _MOST_REMEMBERED

    def tag(self, client: str, size: float) -> float:
        """The tag of work of this size that arrives now."""
        end = self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + size
        return math.ceil(end / self._turn) * self._turn if self._turn else end

    def served(self, tag: float) -> None:
        """The work with this tag was taken."""
        self._now = max(self._now, tag)
        if len(self._ends) > self._prune_at:  # a client without waiting work needs no entry
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
            self._prune_at = max(_MOST_REMEMBERED, 2 * len(self._ends))
