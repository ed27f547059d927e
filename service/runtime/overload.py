"""How long a request may wait for its work to begin, and when it is refused instead.

A queue absorbs bursts, which may wait `max_wait_s`. A queue that reaches this bound shows an overload, and its length then only delays
every request. So from a refusal on, until `_CALM_S` have passed without one, the queue is bounded to what keeps the runtime busy. (The idea
is CoDel's: Nichols and Jacobson, ACM Queue 10(5), 2012; for servers: Maurer, ACM Queue 13(8), 2015.) The same bound holds as soon as work
arrives far faster than it can be done, before the queue is that long.

Moments are those of one clock, given by the caller.
"""

import math

from service.errors import Overloaded, QueueTooLong

_CALM_S = 1.0
_UNDELAYED_PER_S, _MOST_DELAY_S = 200.0, 1.0  # refusals: so many a second are held back for a second
# Sustained overload: in each of three consecutive windows of at least 0.1 s and 10 requests, the work that arrives is more than the runtime
# can do and more than 1.5 times the work begun.
_EXCESS, _STRETCHES, _STRETCH_S, _STRETCH_REQUESTS = 1.5, 3, 0.1, 10


class Inflow:
    """Whether work arrives far faster than it is done. Clients that wait for their answers cannot keep that up for long."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._requests, self._came_s, self._begun_s = 0, 0.0, 0.0  # since then
        self._fast = 0  # stretches before that, in a row, with too much work

    def came(self, now: float, work_s: float) -> None:
        """Count a request, admitted or refused, whose work takes the runtime `work_s`."""
        if now - self._since > _CALM_S:
            self._begin(now)
            self._fast = 0
        self._requests += 1
        self._came_s += work_s
        if (passed_s := now - self._since) >= _STRETCH_S and self._requests >= _STRETCH_REQUESTS:
            self._fast = self._fast + 1 if self._came_s > max(passed_s, _EXCESS * self._begun_s) else 0
            self._begin(now)

    def begun(self, work_s: float) -> None:
        """Count work that the runtime has begun."""
        self._begun_s += work_s

    def excessive(self, now: float) -> bool:
        return self._fast >= _STRETCHES and now - self._since <= _CALM_S

    def _begin(self, now: float) -> None:
        self._since, self._requests, self._came_s, self._begun_s = now, 0, 0.0, 0.0


class Patience:
    """Of one queue."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self.inflow = Inflow()
        self._refused = -math.inf  # when a request was last refused because the queue had grown too long

    def bound_s(self, now: float, busy_s: float) -> float:
        """How long the queue may be. `busy_s` of it keep the runtime busy."""
        return min(busy_s, self._max_wait_s) if self.standing(now) else self._max_wait_s

    def standing(self, now: float) -> bool:
        """Whether there is more load than service."""
        return now - self._refused < _CALM_S or self.inflow.excessive(now)

    def check(self, now: float, queue_s: float, busy_s: float, *, crowded: bool = True) -> None:
        """Raise QueueTooLong if `queue_s` of queued work exceeds the current bound. An empty queue always admits.

        Unless `crowded`, the queue is long for this client alone, and the refusal does not shorten the bound of the others.
        """
        bound_s = self.bound_s(now, busy_s)
        if queue_s > bound_s:
            if crowded and not self.inflow.excessive(now):  # overload by inflow ends by itself
                self._refused = now
            raise QueueTooLong(
                f"Model is overloaded: the queue needs about {queue_s:.2f} s and may need {bound_s:.2f} s",
                retry_after_s=max(queue_s, _CALM_S) if self.standing(now) else queue_s,  # sooner, it would be part of the overload
            )


class Lag:
    """Of requests that wait before this process reads them: they may be late for once, as after a pause, but not all the time."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._late_since = math.inf

    def check(self, now: float, waited_s: float) -> None:
        """Raise Overloaded for a request that has waited too long, if every request in that time has waited too long."""
        if waited_s <= self._max_wait_s:
            self._late_since = math.inf
            return
        self._late_since = min(self._late_since, now)
        if now - self._late_since > self._max_wait_s:
            raise Overloaded(
                f"Service is overloaded: the request waited {waited_s:.2f} s to be read, and the most is {self._max_wait_s:g} s",
                retry_after_s=waited_s,
            )


class Refusals:
    """How long a refusal is held back: longer, the more refusals there are.

    A client that asks again at once, whatever `Retry-After` says, costs half a millisecond each time, on the cores that compute. Held back,
    each such client is refused about once a second.
    """

    def __init__(self) -> None:
        self._at = -math.inf
        self._rate = 0.0  # a second, moving average over one second

    def delay_s(self, now: float) -> float:
        """The delay of a refusal that is made now, in seconds."""
        self._rate = self._rate * math.exp(min(self._at - now, 0.0)) + 1
        self._at = now
        return min(self._rate / _UNDELAYED_PER_S, _MOST_DELAY_S)
