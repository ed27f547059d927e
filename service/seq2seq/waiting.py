"""Requests that wait for rows, and their order. It has no thread and no clock: the owner holds a lock and passes the time.

Rows are shared by client, and within a client by request: a free row goes to the client with the fewest. A request waits at most
`max_wait_s` for its first row: it is refused if a longer wait is expected, and ends with an error if the time runs out.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from service.errors import Overloaded, QueueTooLong
from service.generation.run import Run
from service.overload.queue_bound import QueueBound
from service.runtime.lanes import Lane
from service.seq2seq.request import WritingRequest
from service.seq2seq.search import Search

Key = TypeVar("Key", bound=Hashable)

_BACKLOG = 16  # times `max_waiting`: limit on waiting sources of requests that have started


@dataclass(frozen=True, kw_only=True)
class WritingLimits:
    """Bounds of one engine."""

    rows: int = 32  # of a step; a beam of K outputs has up to K
    max_waiting: int = 256  # sources without a row, of requests that have none
    max_wait_s: float = 1.0  # of an interactive request for its first row
    max_bulk_wait_s: float = 30.0
    bulk_delay_s: float = 2.0  # how long interactive requests may pass a bulk request


@dataclass(eq=False)
class Job:
    """One source and the runs that want its outputs."""

    request: WritingRequest
    runs: list[Run]
    search: Search
    asked: "Asked"
    wanted: bool = True  # by any of the runs; set on the loop


@dataclass(eq=False)
class Asked:
    """One request, and its sources without a row."""

    client: str
    lane: Lane
    since: float
    jobs: deque[Job]
    begun: bool = False  # one of its sources has or had a row

    @property
    def rows(self) -> int:
        return sum(job.request.beams for job in self.jobs)


class Waiting:
    """The queue of one engine, in two lanes."""

    def __init__(self, limits: WritingLimits) -> None:
        self._limits = limits
        self._max_wait_s = {Lane.INTERACTIVE: limits.max_wait_s, Lane.BULK: limits.max_bulk_wait_s}
        self._bounds = {lane: QueueBound(bound_s) for lane, bound_s in self._max_wait_s.items()}
        self._asked: dict[Asked, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return sum(len(asked.jobs) for asked in self._asked)

    @property
    def jobs(self) -> list[Job]:
        return [job for asked in self._asked for job in asked.jobs]

    def put(self, asked: Asked, now: float, *, free: int, job_s: float) -> list[Job]:
        """Queue a request, or raise Overloaded. `free` rows are unused; a source keeps its rows for about `job_s`.

        Returns the jobs of requests that lose their place to it if the queue is full: their client has more in it.
        """
        wait_s = self._ahead(asked, free) * job_s / self._limits.rows
        self._bounds[asked.lane].check(now, wait_s, math.inf)
        new = [each for each in self._asked if not each.begun]
        lost: list[Asked] = []
        while new and sum(len(each.jobs) for each in (*new, asked)) > self._limits.max_waiting:
            by_client = _counted((each.client, len(each.jobs)) for each in new)
            longest, most = by_client.most_common(1)[0]
            if by_client[asked.client] + len(asked.jobs) >= most:
                raise self._full(job_s)
            lost.append(next(each for each in reversed(new) if each.client == longest))
            new.remove(lost[-1])
        if len(self) and len(self) + len(asked.jobs) > _BACKLOG * self._limits.max_waiting:
            raise self._full(job_s)
        for each in lost:
            del self._asked[each]
        self._asked[asked] = None
        return [job for each in lost for job in each.jobs]

    def next(self, now: float, taken: Iterable[Job]) -> Job | None:
        """The next job, which stays queued until `take`, so that smaller ones do not starve a beam that does not fit yet."""
        by_client = _counted((job.asked.client, job.request.beams) for job in taken)
        by_request = _counted((job.asked, job.request.beams) for job in taken)

        def rank(asked: Asked) -> tuple[bool, int, int, float]:
            passed = asked.lane == Lane.BULK and now - asked.since <= self._limits.bulk_delay_s
            return passed, by_client[asked.client], by_request[asked], asked.since

        chosen = min(self._asked, key=rank, default=None)
        return None if chosen is None else chosen.jobs[0]

    def take(self, job: Job) -> None:
        job.asked.begun = True
        self.remove(job)

    def remove(self, job: Job) -> None:
        job.asked.jobs.remove(job)
        if not job.asked.jobs:
            del self._asked[job.asked]

    def overdue(self, now: float) -> list[tuple[Job, QueueTooLong]]:
        """Remove and return the jobs of requests that waited too long for their first row, with their errors."""
        late = [asked for asked in self._asked if not asked.begun and now - asked.since > self._max_wait_s[asked.lane]]
        told = []
        for asked in late:
            del self._asked[asked]
            waited_s, bound_s = now - asked.since, self._max_wait_s[asked.lane]
            words = f"Model is overloaded: the request has waited {waited_s:.2f} s to be written and may wait {bound_s:g} s"
            told += [(job, QueueTooLong(words, retry_after_s=max(waited_s, 1.0))) for job in asked.jobs]
        return told

    def full(self) -> Overloaded:
        """The error of a request that has lost its place."""
        return self._full(1.0)

    def _ahead(self, asked: Asked, free: int) -> int:
        """Rows that are given out before this request gets its first: those of its client, and as many of each other client. An empty
        queue admits any request."""
        if not self._asked:
            return 0
        by_client = _counted((each.client, each.rows) for each in self._asked if each.lane <= asked.lane)
        own, first = by_client.pop(asked.client, 0), asked.jobs[0].request.beams
        return max(own + sum(min(rows, own + first) for rows in by_client.values()) + first - free, 0)

    def _full(self, job_s: float) -> Overloaded:
        waiting, most = len(self), self._limits.max_waiting
        return Overloaded(
            f"Model is overloaded: {waiting} sources wait, and the most is {most}",
            retry_after_s=max(waiting * job_s / self._limits.rows, 0.1),
        )


def _counted(pairs: Iterable[tuple[Key, int]]) -> Counter[Key]:
    counts: Counter[Key] = Counter()
    for key, number in pairs:
        counts[key] += number
    return counts
