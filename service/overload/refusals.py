"""Refuses requests before they reach a queue: when requests are read late, and when a pool has just refused another request. Also computes
by how much refusals are delayed.
"""

import math

from service.errors import Overloaded, QueueTooLong
from service.runtime.lanes import Lane

_UNDELAYED_PER_S, _MOST_DELAY_S = 200.0, 1.0  # rate of refusals (per second) at which each is delayed by 1 s; longest delay in seconds
_REPEATED_S = 0.05  # seconds for which a gateway repeats a pool's refusal; the pool's queues take longer to empty


class ReadDelay:
    """Refuses requests that waited too long before this process read them, if all recent requests waited too long. So the few
    requests that waited during a short pause of the process are not refused.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._late_since = math.inf

    def check(self, now: float, waited_s: float) -> None:
        """Raise Overloaded if this request, and every other request in the last `max_wait_s` seconds, waited longer than `max_wait_s` to be
        read.
        """
        if waited_s <= self._max_wait_s:
            self._late_since = math.inf
            return
        self._late_since = min(self._late_since, now)
        if now - self._late_since > self._max_wait_s:
            raise Overloaded(
                f"Service is overloaded: the request waited {waited_s:.2f} s to be read, and the most is {self._max_wait_s:g} s",
                retry_after_s=waited_s,
            )


class PoolRefusals:
    """The last refusal by a pool in each lane. A gateway repeats this refusal for at most `_REPEATED_S` seconds, so
    that it does not tokenise requests that the pool would refuse too.
    """

    def __init__(self) -> None:
        self._last: dict[Lane, tuple[float, QueueTooLong]] = {}

    def note(self, lane: Lane, now: float, refusal: QueueTooLong) -> None:
        """Record that no replica admitted a request. `refusal` is the error of one of the replicas."""
        self._last[lane] = now, refusal

    def current(self, lane: Lane, now: float) -> QueueTooLong | None:
        """Return a copy of the last refusal if it is recent enough to be repeated, else None."""
        at, refusal = self._last.get(lane, (-math.inf, None))
        if refusal is None or now - at >= min(refusal.retry_after_s, _REPEATED_S):
            return None
        return QueueTooLong(refusal.message, retry_after_s=refusal.retry_after_s)


class RefusalDelay:
    """Computes the delay of refusals: the more refusals per second, the longer the delay.

    A client that ignores `Retry-After` and retries at once costs half a millisecond of CPU each time. With the delay, such a client is
    refused only about once a second.
    """

    def __init__(self) -> None:
        self._at = -math.inf
        self._rate = 0.0  # refusals per second, moving average over one second

    def delay_s(self, now: float) -> float:
        """Count a refusal that is made now, and return its delay in seconds."""
        self._rate = self._rate * math.exp(min(self._at - now, 0.0)) + 1
        self._at = now
        return min(self._rate / _UNDELAYED_PER_S, _MOST_DELAY_S)
