"""Chooses among several ways to make a call by trying them on the calls that are needed anyway.

They are not tried at the start of a process: other processes start at the same time, and what is quicker beside them may be slower later.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

TRIES: Final = 8  # calls in a row for which a way is tried; the first one does not count, because it follows calls of another way
FIRST: Final = 50  # calls after which all ways are tried again the first time, because the first calls of a process mislead
AGAIN: Final = 1000  # most calls after which they are tried again, because the work beside the calls changes
MARGIN: Final = 0.95  # another way than the first is chosen if it takes at most this part of the first one's time


class Quicker:
    """Makes calls that can be made in several ways, with equal results. The first way is preferred. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._way, self._left = 0, TRIES  # the way in use, and for how many more calls
        self._kept = FIRST  # for how many calls the next choice is kept
        self._tried: list[tuple[int, float]] | None = []  # way of each call, and its seconds for a size of 1; None: no trial

    def __call__(self, ways: Sequence[Callable[[], None]], size: int) -> None:
        """Make a call in one of the ways. Their number and order are the same each time. `size` is the size of the call, e.g. in tokens."""
        started = self._clock()
        ways[self._way]()
        self._left -= 1
        if self._tried is not None:
            self._tried.append((self._way, (self._clock() - started) / size))
        if self._left == 0:
            self._go_on(len(ways))

    def _go_on(self, n_ways: int) -> None:
        """Try the next way, or choose one."""
        if self._tried is None:
            self._way, self._left, self._tried = 0, TRIES, []
        elif self._way + 1 < n_ways:
            self._way, self._left = self._way + 1, TRIES
        else:
            typical = [statistics.median([s for tried, s in self._tried if tried == way][1:]) for way in range(n_ways)]
            best = min(typical)
            self._way = 0 if best > MARGIN * typical[0] else typical.index(best)
            self._left, self._tried, self._kept = self._kept, None, min(4 * self._kept, AGAIN)
