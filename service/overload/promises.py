"""Remembers when refused clients were told to come back, so that each is told a later time than those before it and finds a place then.

Without this memory all clients that are refused together would be told the same time, and would find a queue that is full again. The
work of a refused request counts as queued from its refusal until the client comes back, or until it is too late. A client is told the time
that the queue and the promised work before it need. As in a queue, a client that was refused more often than others delays mainly itself.
"""

import bisect
import random
from collections import Counter
from typing import NamedTuple

_MOST = 1024  # largest number of promises that are remembered
_JITTER = 0.1  # a client is told up to this share more than needed, so that clients that are told about the same time come apart
_LATE = 0.5  # a client may be late, and then wait for its turn, by this share of the time that it was told
_LEAST_LATE_S = 1.0  # or by this many seconds, because many clients round the time up to seconds
_ROUNDING_S = 0.001
_SWEEP_S = 0.1  # promises that were not kept are looked for this often


class _Promise(NamedTuple):
    turn: float  # time at which the queue and the promises before this one are done
    number: int
    who: str
    due: float  # time at which the client was told to come back
    told_s: float
    work_s: float

    @property
    def late_s(self) -> float:
        """Return by how many seconds the client may be late, and then wait for its turn."""
        return max(_LATE * self.told_s, _LEAST_LATE_S)


class Promises:
    """The promises of one queue. Times are in seconds of one clock, work in seconds of the runtime."""

    def __init__(self) -> None:
        self._promises: list[_Promise] = []  # in the order of their turns
        self._swept = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._promises)

    def wait_s(self, client: str, now: float, queue_s: float, work_s: float) -> float:
        """Return how long a new request of this client has to wait. `queue_s` is the work in the queue, `work_s` that of the request. Work
        of another client counts up to the client's own promised work, with this request. Promises whose turn comes later do not count.
        """
        self._sweep(now)
        who, counted = name_of(client), Counter[str]()
        own = work_s + sum(each.work_s for each in self._promises if each.who == who)
        for each in self._promises:
            if each.turn > now + queue_s + work_s:
                break
            more = each.work_s if each.who == who else min(each.work_s, own - counted[each.who])
            counted[each.who] += more  # type: ignore[assignment]
            queue_s += more
        return queue_s

    def outstanding(self, now: float) -> bool:
        """Return whether a client may still come back that was promised a place."""
        self._sweep(now)
        return bool(self._promises)

    def make(self, client: str, now: float, wait_s: float, work_s: float) -> float:
        """Promise a place to a client whose request is refused. Returns how many seconds it is told to wait, at least `wait_s`."""
        told_s, who = wait_s * (1 + _JITTER * random.random()), name_of(client)
        if len(self._promises) >= _MOST:
            longest, _ = Counter(each.who for each in self._promises).most_common(1)[0]
            if longest == who:
                return told_s
            self._promises.remove(next(each for each in reversed(self._promises) if each.who == longest))
        self._number += 1
        promise = _Promise(now + wait_s, self._number, who, now + told_s, told_s, work_s)
        bisect.insort(self._promises, promise)
        return told_s

    def withdraw(self, client: str, told_s: float) -> None:
        """Forget the promise of a client that was told this time, because it asks elsewhere. Does nothing if there is none."""
        who = name_of(client)
        self._promises = [each for each in self._promises if (each.who, each.told_s) != (who, told_s)]

    def late_s(self, client: str, now: float) -> float | None:
        """Return how long a client that comes back when it was told to may wait for its turn, or None for any other client."""
        promise = self._due(client, now)
        return None if promise is None else promise.late_s

    def keep(self, client: str, now: float) -> None:
        """Forget the promise of a client that has come back and was admitted. Does nothing if there is none."""
        if (promise := self._due(client, now)) is not None:
            self._promises.remove(promise)

    def _sweep(self, now: float) -> None:
        if now - self._swept > _SWEEP_S:
            self._swept = now
            self._promises = [each for each in self._promises if now <= each.due + each.late_s]

    def _due(self, client: str, now: float) -> _Promise | None:
        who = name_of(client)
        return next((each for each in self._promises if each.who == who and each.due - _ROUNDING_S <= now <= each.due + each.late_s), None)


def name_of(client: str) -> str:
    """Return the tenant, or the address without the port, because a client may come back over another connection."""
    host, _, port = client.rpartition(":")
    return host if port.isdecimal() and not client.startswith("tenant:") else client
