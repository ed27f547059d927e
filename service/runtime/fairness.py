"""Fair queueing: the order in which clients share a server that handles one piece of work at a time.

The next piece is the one that would finish first if all clients were served in parallel, and the pieces of each client in sequence. So
small pieces overtake large ones, and a client that sends without pause does not block the others. (Self-clocked fair queueing: Golestani,
INFOCOM 1994.)

If a turn size is set, the finish times are rounded up to its multiples, and equal ones are served in order of arrival. So the first of
several large requests ends early. Without turns all of them would end at about the same time.
"""

import math

_MOST_REMEMBERED = 256


class FairOrder:
    """Assigns a tag to each piece of work. The piece with the smallest tag is next. Not thread-safe."""

    def __init__(self, turn: float = 0.0) -> None:
        """`turn`: tags are rounded up to multiples of it. It has the unit of `tag`'s sizes. 0: tags are not rounded."""
        self._turn = turn
        self._now = 0.0
        self._ends: dict[str, float] = {}  # client -> its last tag, before rounding
        self._prune_at = _MOST_REMEMBERED

    def tag(self, client: str, size: float) -> float:
        """Return the tag of a client's work of this size that arrives now."""
        end = self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + size
        return math.ceil(end / self._turn) * self._turn if self._turn else end

    def served(self, tag: float) -> None:
        """Record that the work with this tag is being served."""
        self._now = max(self._now, tag)
        if len(self._ends) > self._prune_at:  # remove the entries of clients without waiting work, which are not needed
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
            self._prune_at = max(_MOST_REMEMBERED, 2 * len(self._ends))
