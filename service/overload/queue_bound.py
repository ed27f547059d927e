"""How long one queue may be, and when it is overloaded. The caller passes the time, in seconds of one clock.

A queue absorbs bursts, which may wait `max_wait_s`. A queue that reaches this bound shows an overload, and its length then only delays
every request. So from a refusal on, until `_CALM_S` have passed without one, the queue is bounded to what keeps the runtime busy. (The idea
is CoDel's: Nichols and Jacobson, ACM Queue 10(5), 2012; for servers: Maurer, ACM Queue 13(8), 2015.) The same bound holds during a
sustained overload, which is detected before the queue is that long.
"""

import math

from service.errors import QueueTooLong

_CALM_S = 1.0
# Sustained overload: in each of three consecutive windows of at least 0.1 s and 10 requests, the work that arrives is more than the runtime
# can do and more than 1.5 times the work started.
_EXCESS, _WINDOWS, _WINDOW_S, _WINDOW_REQUESTS = 1.5, 3, 0.1, 10


class ArrivalRate:
    """Compares the work that arrives with the work that is started. Clients that wait for their answers cannot exceed it for long."""

    def __init__(self) -> None:
        self._since = -math.inf  # begin of the current window
        self._requests, self._arrived_s, self._started_s = 0, 0.0, 0.0  # in it
        self._excessive_windows = 0  # consecutive, before it

    def arrived(self, now: float, work_s: float) -> None:
        """Count a request, admitted or refused, whose work takes the runtime `work_s`."""
        if now - self._since > _CALM_S:
            self._begin(now)
            self._excessive_windows = 0
        self._requests += 1
        self._arrived_s += work_s
        if (passed_s := now - self._since) >= _WINDOW_S and self._requests >= _WINDOW_REQUESTS:
            excessive = self._arrived_s > max(passed_s, _EXCESS * self._started_s)
            self._excessive_windows = self._excessive_windows + 1 if excessive else 0
            self._begin(now)

    def started(self, work_s: float) -> None:
        """Count work that the runtime has started."""
        self._started_s += work_s

    def excessive(self, now: float) -> bool:
        """Whether the overload is sustained."""
        return self._excessive_windows >= _WINDOWS and now - self._since <= _CALM_S

    def _begin(self, now: float) -> None:
        self._since, self._requests, self._arrived_s, self._started_s = now, 0, 0.0, 0.0


class QueueBound:
    """The bound of one queue, in seconds of work."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self.arrivals = ArrivalRate()
        self._refused = -math.inf  # when the queue was last too long for every client

    def bound_s(self, now: float, short_queue_s: float) -> float:
        """The current bound. `short_queue_s` of work keep the runtime busy: the bound under overload."""
        return min(short_queue_s, self._max_wait_s) if self.overloaded(now) else self._max_wait_s

    def overloaded(self, now: float) -> bool:
        return now - self._refused < _CALM_S or self.arrivals.excessive(now)

    def check(self, now: float, queue_s: float, short_queue_s: float, *, for_all: bool = True) -> None:
        """Raise QueueTooLong if `queue_s` of queued work exceeds the current bound. An empty queue always admits.

        `for_all`: the queue is too long for every client, not for this one alone, so the refusal is a sign of overload.
        """
        bound_s = self.bound_s(now, short_queue_s)
        if queue_s > bound_s:
            if for_all and not self.arrivals.excessive(now):  # a sustained overload ends when arrivals fall, whatever is refused
                self._refused = now
            raise QueueTooLong(
                f"Model is overloaded: the queue needs about {queue_s:.2f} s and may need {bound_s:.2f} s",
                retry_after_s=max(queue_s, _CALM_S) if self.overloaded(now) else queue_s,  # an earlier retry would prolong the overload
            )
