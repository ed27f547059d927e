"""The offered load of an engine: the work of all requests that arrive for the engine, as a share of the engine's capacity. Pools are scaled
by this load.

Refused work counts as much as admitted work. Under overload an engine works at capacity and refuses all further work, so neither its
throughput nor its queue shows how many replicas are needed.

Each request is counted once, as far as possible. If one replica of a pool refuses a request, a gateway sends the request to a second
replica. So replicas of a pool count no refusals (`counts_refusals` is False), and the gateway counts one if no replica admits the request.
A gateway also recognises a refused request that is sent again, and takes it back from the count when a replica admits it
(`RefusedRequests` in `service/overload/refusals.py`). So work can be negative: it is subtracted from the work that follows. If a client
sends equal requests and repeats none, its refusals are taken for repeats, so replicas are added in several steps.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from service.errors import Overloaded

_MEMORY = 0.99  # factor by which the weight of earlier runs decreases at each run, in the average time that a run holds a slot


class Offered:
    """The seconds of work that were requested of one engine, whether admitted or refused. Thread-safe."""

    def __init__(self, count: Callable[[float], object] = lambda work_s: None) -> None:
        """`count` is called with the seconds of each addition, e.g. `inc` of a Prometheus counter, whose rate is then the load."""
        self.counts_refusals = True
        self._count = count
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._before_s = 0.0  # work that was counted before it came, as a number below 0
        self._then: tuple[float, float] | None = None  # time of the last call of `load`, and the total work at that time

    def add(self, work_s: float) -> None:
        """Count work that occupies the whole engine for `work_s` seconds. Below 0: so much of the following work was counted before."""
        with self._lock:
            self._add(work_s)

    def load(self, now: float) -> float:
        """Return the work since the previous call, divided by the time since that call. The value 1 is the engine's capacity. The first
        call returns 0.
        """
        with self._lock:
            then, total_s = self._then or (now, self._total_s)
            if self._then is None or now > then:
                self._then = now, self._total_s
            return (self._total_s - total_s) / (now - then) if now > then else 0.0

    def _add(self, work_s: float) -> None:
        work_s += self._before_s
        self._before_s, work_s = min(work_s, 0.0), max(work_s, 0.0)
        self._total_s += work_s
        self._count(work_s)


class OfferedSlots(Offered):
    """The load of an engine whose runs hold slots. The load is the share of slots that are held, plus the share
    that refused runs would have held.

    A refused run is assumed to hold its slot as long as recent runs did. A waiting run is counted only when it gets its slot or is refused,
    because the number of waiting runs depends on how long runs may wait, not on how many arrive.
    """

    def __init__(self, slots: int, count: Callable[[float], object] = lambda work_s: None) -> None:
        super().__init__(count)
        self._slots = slots
        self._held, self._since = 0, 0.0
        self._begun = self._held_s = 0.0  # slots given to runs, and seconds for which slots were held; their ratio is the average

    def hold(self, now: float, slots: int) -> None:
        """Record that `slots` slots are held from now on."""
        with self._lock:
            self._hold(now, slots)

    def load(self, now: float) -> float:
        with self._lock:
            self._hold(now, self._held)
        return super().load(now)

    def begin(self, slots: int = 1) -> None:
        """Record that a run got its slots."""
        with self._lock:
            memory = _MEMORY**slots
            self._begun, self._held_s = memory * self._begun + slots, memory * self._held_s

    def refuse(self, slots: float = 1) -> None:
        """Count refused runs, which need `slots` slots together. Below 0: so many runs were counted before."""
        with self._lock:
            self._add(slots * self._held_s / max(self._begun, 1) / self._slots)

    @contextlib.contextmanager
    def refusing(self, slots: int) -> Iterator[None]:
        """Count a refusal if the `with` block raises Overloaded, unless a gateway counts refusals."""
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
