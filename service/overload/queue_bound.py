"""The bound on one queue's length, and the detection of overload. The caller passes the time, in seconds of one clock.

A queue absorbs bursts, whose requests may wait up to `max_wait_s`. If a queue reaches this bound, the queue is overloaded, and a long queue
only delays every request. So after a refusal, until `_CALM_S` seconds have passed without another refusal, the bound is only the length
that keeps the runtime busy. (The idea is CoDel's: Nichols and Jacobson, ACM Queue 10(5), 2012; for servers: Maurer, ACM Queue 13(8), 2015.)
The same bound applies during a sustained overload, which is detected before the queue is that long.

The queue has places for clients that come back when their refusal told them to (`promises.py`).
"""

import math

from service.errors import QueueTooLong
from service.overload.promises import Promises

_CALM_S = 1.0
# Sustained overload: in each of three consecutive windows of at least 0.1 s and 10 requests, the work that arrives is more than the runtime
# can do and more than 1.5 times the work started.
_EXCESS, _WINDOWS, _WINDOW_S, _WINDOW_REQUESTS = 1.5, 3, 0.1, 10


class ArrivalRate:
    """Compares the work that arrives with the work that is started. A client that waits for each answer before its next request cannot
    cause an excess of arrivals for long.
    """

    def __init__(self) -> None:
        self._since = -math.inf  # start of the current window
        self._requests, self._arrived_s, self._started_s = 0, 0.0, 0.0  # requests, arrived work and started work in the window
        self._excessive_windows = 0  # consecutive windows with excessive arrivals, before the current window

    def arrived(self, now: float, work_s: float) -> None:
        """Count a request that arrived, admitted or refused. Its work takes the runtime `work_s` seconds."""
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
        """Count `work_s` seconds of work that the runtime has started."""
        self._started_s += work_s

    def excessive(self, now: float) -> bool:
        """Return whether there is a sustained overload now: too much work arrived in the last `_WINDOWS` windows."""
        return self._excessive_windows >= _WINDOWS and now - self._since <= _CALM_S

    def _begin(self, now: float) -> None:
        self._since, self._requests, self._arrived_s, self._started_s = now, 0, 0.0, 0.0


class QueueBound:
    """The bound of one queue, in seconds of work."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self.arrivals = ArrivalRate()
        self._refused = -math.inf  # when the queue was last too long for every client
        self.promises = Promises()
        self.patient_until = -math.inf  # until then, requests may be queued that were promised a place and may wait longer than others

    def bound_s(self, now: float, short_queue_s: float) -> float:
        """Return the current bound in seconds. Under overload it is at most `short_queue_s`, the work that keeps the runtime busy."""
        return min(short_queue_s, self._max_wait_s) if self.overloaded(now) else self._max_wait_s

    def overloaded(self, now: float) -> bool:
        return now - self._refused < _CALM_S or self.arrivals.excessive(now)

    def check(
        self,
        now: float,
        queue_s: float,
        short_queue_s: float,
        *,
        for_all: bool = True,
        client: str = "",
        work_s: float = 0.0,
        least_work_s: float | None = None,
    ) -> float:
        """Raise QueueTooLong if `queue_s` seconds of queued work, and the work promised to others, exceed the current bound. An empty queue
        always admits. Returns how many seconds the request may wait in the queue.

        `for_all` means that the queue is too long for every client, not only for the present one, so that the refusal is a sign of
        overload. `work_s` is the time that the runtime needs for the request, and `least_work_s` for the smallest that it may be.
        """
        # A sustained overload has no places for all: then the queue stays short and admits in order of arrival.
        sustained = self.arrivals.excessive(now)
        late_s = None if sustained else self.promises.late_s(client, now)
        if late_s is not None and queue_s <= (patience_s := self._max_wait_s + late_s):
            self.patient_until = max(self.patient_until, now + patience_s)
            return patience_s
        bound_s, needed_s = self.bound_s(now, short_queue_s), queue_s
        if queue_s > 0 and self.promises and not sustained:
            needed_s = self.promises.wait_s(client, now, queue_s, work_s if least_work_s is None else least_work_s)
        if needed_s > bound_s:
            if for_all and queue_s > bound_s and not sustained:  # during a sustained overload, refusals do not prolong it
                self._refused = now
            raise QueueTooLong(
                f"Model is overloaded: the queue needs about {needed_s:.2f} s and may need {bound_s:.2f} s",
                retry_after_s=self.promised_s(now, queue_s, client, work_s),
            )
        return self._max_wait_s

    def promised_s(self, now: float, queue_s: float, client: str, work_s: float) -> float:
        """Promise a place to a request that is refused, and return in how many seconds. `queue_s` is the work in the queue."""
        # At least _CALM_S under overload, because an earlier retry would prolong the overload.
        least_s = max(queue_s, _CALM_S) if self.overloaded(now) else queue_s
        return self.promises.make(client, now, self.promises.wait_s(client, now, least_s, work_s), work_s)
