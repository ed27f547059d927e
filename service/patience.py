"""How long a request may wait for its work to begin, and when it is refused instead.

A queue is for bursts, and a burst may wait `max_wait_s`. A queue that has come to that is no burst but more load than there is service, and
then its length does nothing but delay everybody. So from a refusal on, until none was needed for `_CALM_S`, the queue stands no longer than
what keeps the runtime busy. (The idea is CoDel's: Nichols and Jacobson, ACM Queue 10(5), 2012; for servers: Maurer, ACM Queue 13(8), 2015.)

Moments are those of one clock, given by the caller.
"""

import math

from service.errors import Overloaded, QueueTooLong

_CALM_S = 1.0


class Patience:
    """Of one queue."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._refused = -math.inf  # when somebody last was

    def bound_s(self, now: float, busy_s: float) -> float:
        """How long the queue may be. `busy_s` of it keep the runtime busy."""
        return min(busy_s, self._max_wait_s) if self.standing(now) else self._max_wait_s

    def standing(self, now: float) -> bool:
        """Whether there is more load than service."""
        return now - self._refused < _CALM_S

    def check(self, now: float, queue_s: float, busy_s: float) -> None:
        """QueueTooLong for who comes to a queue of `queue_s` that is too long; whoever comes to an empty one is taken."""
        bound_s = self.bound_s(now, busy_s)
        if queue_s > bound_s:
            self._refused = now
            raise QueueTooLong(
                f"Model is overloaded: the queue needs about {queue_s:.2f} s and may need {bound_s:.2f} s", retry_after_s=queue_s
            )


class Lag:
    """Of requests that wait before this process reads them: they may be late for once, as after a pause, but not all the time."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._late_since = math.inf

    def check(self, now: float, waited_s: float) -> None:
        """Overloaded for who has waited too long, when nobody has waited less for as long as that."""
        if waited_s <= self._max_wait_s:
            self._late_since = math.inf
            return
        self._late_since = min(self._late_since, now)
        if now - self._late_since > self._max_wait_s:
            raise Overloaded(
                f"Service is overloaded: the request waited {waited_s:.2f} s to be read, and the most is {self._max_wait_s:g} s",
                retry_after_s=waited_s,
            )
