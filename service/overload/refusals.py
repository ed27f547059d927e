"""Refusals around the queues: of requests that were read late, at gateways whose pool has just refused, and their delay."""

import math

from service.errors import Overloaded, QueueTooLong
from service.runtime.lanes import Lane

_UNDELAYED_PER_S, _MOST_DELAY_S = 200.0, 1.0  # this many refusals a second are delayed by one second
_REPEATED_S = 0.05  # how long a gateway repeats a refusal: less than the replicas' queues hold by then


class ReadDelay:
    """Refuses requests that wait too long before this process reads them. Some may be late after a pause, but not all of them for long."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._late_since = math.inf

    def check(self, now: float, waited_s: float) -> None:
        """Raise Overloaded for a request that waited longer than `max_wait_s`, if every request of the last `max_wait_s` did."""
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
    """The last refusal of a pool in each lane. A gateway repeats it for a moment, which saves the work of tokenising the next requests."""

    def __init__(self) -> None:
        self._last: dict[Lane, tuple[float, QueueTooLong]] = {}

    def note(self, lane: Lane, now: float, refusal: QueueTooLong) -> None:
        """No replica took the request; one of them gave this reason."""
        self._last[lane] = now, refusal

    def current(self, lane: Lane, now: float) -> QueueTooLong | None:
        """A copy of the last refusal, for as long as it is repeated."""
        at, refusal = self._last.get(lane, (-math.inf, None))
        if refusal is None or now - at >= min(refusal.retry_after_s, _REPEATED_S):
            return None
        return QueueTooLong(refusal.message, retry_after_s=refusal.retry_after_s)


class RefusalDelay:
    """How long a refusal is delayed: the longer, the more refusals there are.

    A client that retries at once, whatever `Retry-After` says, costs half a millisecond each time, on the cores that compute. With the
    delay, each such client is refused about once a second.
    """

    def __init__(self) -> None:
        self._at = -math.inf
        self._rate = 0.0  # refusals per second, moving average over one second

    def delay_s(self, now: float) -> float:
        """The delay of a refusal that is made now, in seconds."""
        self._rate = self._rate * math.exp(min(self._at - now, 0.0)) + 1
        self._at = now
        return min(self._rate / _UNDELAYED_PER_S, _MOST_DELAY_S)
