"""How much work one engine is asked for, as a share of what it can do. Pools are scaled by it.

What is refused counts as much as what is taken: under overload an engine does what it can and refuses the rest, so what it has done, or has
in its queue, says less and less about how many more of it are needed.

Work is counted once, as far as that can be known. Before a pool, a gateway asks a second replica where the first refuses: there the gateway
counts refusals, when no replica has taken the request, and replicas count none (`counts_refusals`). What a client sends again after it was
refused looks like new work, so under overload clients that repeat make the load appear larger, by the rate at which they repeat; it falls
again as soon as there are enough replicas that none is refused.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from service.errors import Overloaded

_MEMORY = 0.99  # weight of the past, at each run that begins, in how long a run keeps its slot


class Offered:
    """Seconds of work of one engine. Any thread may add."""

    def __init__(self, count: Callable[[float], object] = lambda work_s: None) -> None:
        """`count` is told the same: a Prometheus counter's `inc`, whose rate is the load."""
        self.counts_refusals = True
        self._count = count
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._then: tuple[float, float] | None = None  # the moment of the last look, and the total then

    def add(self, work_s: float) -> None:
        """Work that takes all of the engine for so long."""
        with self._lock:
            self._add(work_s)

    def load(self, now: float) -> float:
        """Work that was asked for since the last call, over the time since then: 1 is as much as the engine can do. 0 at the first."""
        with self._lock:
            then, total_s = self._then or (now, self._total_s)
            if self._then is None or now > then:
                self._then = now, self._total_s
            return (self._total_s - total_s) / (now - then) if now > then else 0.0

    def _add(self, work_s: float) -> None:
        self._total_s += work_s
        self._count(work_s)


class OfferedSlots(Offered):
    """Of an engine that gives slots to runs: the slots that are held, and those that refused runs would have held.

    A refused run is taken to need as much as those that began lately. Runs that wait for a slot count when they have it or are refused:
    how many wait at a moment says how long they may, not how many come.
    """

    def __init__(self, slots: int, count: Callable[[float], object] = lambda work_s: None) -> None:
        super().__init__(count)
        self._slots = slots
        self._held, self._since = 0, 0.0
        self._begun = self._held_s = 0.0  # runs that began, and the slot-seconds of all; the older the less

    def hold(self, now: float, slots: int) -> None:
        """From now on so many are held."""
        with self._lock:
            self._hold(now, slots)

    def load(self, now: float) -> float:
        with self._lock:
            self._hold(now, self._held)
        return super().load(now)

    def begin(self, slots: int = 1) -> None:
        """A run has its first slot, or so many."""
        with self._lock:
            memory = _MEMORY**slots
            self._begun, self._held_s = memory * self._begun + slots, memory * self._held_s

    def refuse(self, slots: float = 1) -> None:
        """A run, or so many slots' worth of runs, was refused."""
        with self._lock:
            self._add(slots * self._held_s / max(self._begun, 1) / self._slots)

    @contextlib.contextmanager
    def refusing(self, slots: int) -> Iterator[None]:
        """What is refused in this block with Overloaded counts, unless a gateway does it."""
        try:
            yield
        except Overloaded:
            if self.counts_refusals:
                self.refuse(slots)
            raise

    def _hold(self, now: float, slots: int) -> None:
        if now > self._since:
            held_s = self._held * (now - self._since)
            self._held_s += held_s
            self._add(held_s / self._slots)
            self._since = now
        self._held = slots
