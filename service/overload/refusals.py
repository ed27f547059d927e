"""Refuses requests before they reach a queue: when requests are read late, and when a pool has just refused the same request.
Also computes by how much refusals are delayed.
"""

import heapq
import math
from typing import NamedTuple

from service.errors import Overloaded, QueueTooLong
from service.overload.promises import name_of

_UNDELAYED_PER_S, _MOST_DELAY_S = 200.0, 1.0  # rate of refusals (per second) at which each is delayed by 1 s; longest delay in seconds
_MOST_REFUSED, _LATE_S = 32_768, 30.0  # limit on remembered requests; seconds by which a client may come late, as by delays of its own
_REPEATED_S = 0.05  # seconds for which a gateway refuses a refused request again; the pool's queues take longer to empty


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


class _Refused(NamedTuple):
    work: float  # its work that was counted
    at: float  # when it was refused
    again: float  # when it was told to come back


class RefusedRequests:
    """The requests that a pool has refused through one gateway, so that each counts once as offered work however often it is sent again. A
    request is recognised by its client and its content. If it is sent again at once, it is refused again without asking the pool.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], _Refused] = {}
        self._by_time: list[tuple[float, tuple[str, int]]] = []  # a heap: when each was told to come back, also those that have

    def check(self, client: str, content: int, now: float) -> None:
        """Raise QueueTooLong if this request was refused at most `_REPEATED_S` seconds ago."""
        refused = self._requests.get((name_of(client), content)) if self._requests else None
        if refused is not None and now - refused.at <= _REPEATED_S and now < refused.again:
            raise QueueTooLong("Model is overloaded: this request was just refused", retry_after_s=refused.again - now)

    def refuse(self, client: str, content: int, now: float, work: float, told_s: float, gateways: int = 1) -> float:
        """Remember a refused request that is told to come back in `told_s` seconds. Returns its work less the counted work that
        `come_back` returns.
        """
        counted = self.come_back(client, content, now, gateways)
        while self._by_time and (len(self._by_time) >= _MOST_REFUSED or self._by_time[0][0] + _LATE_S < now):
            self._forget_first()
        request = name_of(client), content
        self._requests[request] = _Refused(work, now, now + told_s)
        heapq.heappush(self._by_time, (now + told_s, request))
        return work - counted

    def come_back(self, client: str, content: int, now: float, gateways: int = 1) -> float:
        """Forget a request that is sent again. Returns its work that was counted, or 0 for any other request.

        Of the requests that this gateway refused and that come back, only one of `gateways` comes back through this gateway. So for each
        of them, as many others are forgotten that may have come back through the other gateways.
        """
        refused = self._requests.pop((name_of(client), content), None) if self._requests else None
        if refused is None or now > refused.again + _LATE_S:
            return 0.0
        work, others = refused.work, gateways - 1
        while others and self._by_time and self._by_time[0][0] <= now:
            if other := self._forget_first():
                work, others = work + other.work, others - 1
        return work

    def _forget_first(self) -> _Refused | None:
        """Forget the request that was told the earliest time. Returns None if it has come back already."""
        again, request = heapq.heappop(self._by_time)
        refused = self._requests.get(request)
        return self._requests.pop(request) if refused is not None and refused.again == again else None


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
