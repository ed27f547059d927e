"""Fair queueing: the order in which clients share a server that handles one piece of work at a time.

The next piece of work is the one that would finish first if all clients were served in parallel, but each client's pieces in sequence. So
small pieces overtake large ones, and a client that sends without pause does not block the others. (Self-clocked fair queueing: Golestani,
INFOCOM 1994.)

If the size of a turn is set, finish times are rounded up to multiples of this size. Pieces with equal finish times are served in order of
arrival. So the first of several large requests ends early. Without turns, all large requests would end at about the same time.
"""

import math

_MOST_REMEMBERED = 256


class FairOrder:
    """Assigns a tag to each piece of work. The piece with the smallest tag is next. Not thread-safe."""

    def __init__(self, turn: float = 0.0) -> None:
        """Tags are rounded up to multiples of `turn`, or not rounded if it is 0. `turn` has the same unit as the sizes that `tag` gets."""
        self._turn = turn
        self._now = 0.0
        self._ends: dict[str, float] = {}  # client -> its last tag, before rounding
        self._prune_at = _MOST_REMEMBERED

    def tag(self, client: str, size: float) -> float:
        """Return the tag of a piece of work of this size, which arrives from this client now."""
        end = self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + size
        return math.ceil(end / self._turn) * self._turn if self._turn else end

    def served(self, tag: float) -> None:
        """Record that the work with this tag is being served."""
        self._now = max(self._now, tag)
        if len(self._ends) > self._prune_at:  # remove the entries of clients that have no waiting work
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}
            self._prune_at = max(_MOST_REMEMBERED, 2 * len(self._ends))
