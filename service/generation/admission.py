"""The queue between the event loop and an engine's thread: jobs that wait for slots, and cancellations.

Slots are shared between clients, and a client's slots between its requests. A free slot goes to the client with the fewest slots. If no
slot is free and jobs can be preempted (set aside), a client with at least two slots more than the waiting client gives back one slot at
once. A client with one slot more gives back a slot when the slot's job has computed a certain number of tokens, the quantum. So if there
are more clients than slots, or more requests of a client than its slots, the slots rotate. A run keeps its slot while no other run competes
for it. Requests that never had a slot and requests that gave one back are chosen alternately, so that neither kind starves.

One lock, held for microseconds, protects the whole queue.
"""

import heapq
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from service.errors import NotReady, Overloaded, QueueTooLong
from service.generation.run import Run
from service.generation.submission import J, Submission
from service.overload.queue_bound import QueueBound
from service.runtime.lanes import Lane

_BACKLOG = 16  # a request of several jobs is refused if, with them, the jobs of started requests exceed this multiple of `max_waiting`
_LEAST_HELD = 16  # tokens that a bulk run computes before an interactive run may take its slot
_TRIED = 8  # if no slot is free, a job to preempt is looked for on behalf of at most this many waiting requests


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits of one engine and its queue."""

    slots: int = 32  # most sequences computed at the same time; a search with K beams needs K slots
    max_waiting: int = 256  # most waiting jobs of requests that have not started
    max_waiting_tokens: float = math.inf  # most tokens in the prompts of the jobs that `max_waiting` limits
    max_wait_s: float = 1.0  # longest wait of an interactive request for its first slots
    max_bulk_wait_s: float = 30.0
    bulk_delay_s: float = 2.0  # how long interactive requests are preferred to a waiting bulk request
    unread_s: float = math.inf  # a run is ended if its client reads no text for this long
    hand_over_s: float = 0.0  # how long tokens of a few runs may wait, to be handed over together; see `pacing.py`


class Turn(NamedTuple, Generic[J]):
    """A job that gets slots, and the job that is preempted for it, or None if enough slots are free."""

    job: J
    instead_of: J | None


class Holding(NamedTuple):
    """The number of slots, and how many each client holds, as known on the event loop."""

    slots: int
    by_client: Mapping[str, int]
    turn_s: float  # estimated seconds that a job keeps its slots while other jobs wait

    @property
    def free(self) -> int:
        return self.slots - sum(self.by_client.values())


class Admission(Generic[J]):
    """A queue of requests in two lanes, interactive and bulk. It limits the number of waiting jobs, the tokens in their prompts, and how
    long each request waits for its first slots.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._max_wait_s = {Lane.INTERACTIVE: limits.max_wait_s, Lane.BULK: limits.max_bulk_wait_s}
        self._bounds = {lane: QueueBound(bound_s) for lane, bound_s in self._max_wait_s.items()}
        self._changed = threading.Condition()
        self._submissions: dict[Submission[J], None] = {}  # the requests with waiting jobs, in the order in which they were queued
        self._waiting = 0  # number of waiting jobs
        self._run_s = 0.0  # estimated seconds between the ends of two runs
        self._turns = 0
        self._cancelled: set[Run] = set()
        self._closed = False
        self.aside = 0  # number of waiting jobs that were preempted
        self.arrived = False  # whether a request has arrived since `turn` was called last

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return self._waiting

    @property
    def slots(self) -> int:
        """Return the number of slots that the waiting jobs need."""
        with self._changed:
            return sum(submission.slots for submission in self._submissions)

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def check(self, client: str, lane: Lane, now: float, holding: Holding, slots: int = 1, runs: int = 1) -> float:
        """Raise QueueTooLong if a new request of this client, of `runs` runs, would wait too long for its first `slots` slots. Returns how
        many seconds it may wait.
        """
        with self._changed:
            self._run_s = holding.turn_s / holding.slots
            wait_s, bound = self._wait_s(client, lane, holding, slots), self._bounds[lane]
            most_wait_s = bound.check(now, wait_s, math.inf, client=client, work_s=runs * self._run_s)
            bound.promises.keep(client, now)
        # A place that was promised may become free a whole turn later, because the runs may have begun together.
        return most_wait_s if most_wait_s <= self._max_wait_s[lane] else most_wait_s + holding.turn_s

    def keeps_places(self, lane: Lane, now: float) -> bool:
        """Return whether places are kept for clients that were refused in this lane."""
        with self._changed:
            return self._bounds[lane].promises.outstanding(now)

    def withdraw(self, lane: Lane, client: str, told_s: float) -> None:
        """Give up the place that a refusal has promised to this client, with `told_s` as its `retry_after_s`."""
        with self._changed:
            self._bounds[lane].promises.withdraw(client, told_s)

    def _wait_s(self, client: str, lane: Lane, holding: Holding, slots: int) -> float:
        """Estimate the seconds until a new request gets its first slot. The estimate assumes that every job needs one slot and that jobs
        take turns.
        """
        before = Counter(each.client for each in self._submissions if each.lane <= lane and not each.begun)
        behind = Counter(each.client for each in self._submissions if each.lane <= lane and each.begun)
        wanted = Counter(holding.by_client)
        for each in self._submissions:
            wanted[each.client] += len(each)
        if before.total() < holding.free:
            return 0.0
        wanted[client] += 1
        share = fair_share(wanted, holding.slots)[client]
        if share >= 1:  # the client gets this share, however many slots others ask for
            ahead, shared = max(before[client] - max(int(share) - holding.by_client.get(client, 0), 0), 0), share
            ahead += min(behind[client], ahead)  # requests that have started and new requests get slots alternately
        else:
            ahead, shared = sum(min(count, before[client] + 1) for count in before.values()), holding.slots
            ahead += min(behind.total(), ahead)
        return ahead * holding.turn_s / shared

    def queue(self, submission: Submission[J], *, retry_after_s: float) -> list[Submission[J]]:
        """Queue a request with all its jobs. If there is no room, waiting requests of clients that have more jobs in the queue are removed
        and returned. An empty queue admits any request. Raises Overloaded if there is still no room, and NotReady if the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise stopping()
            new = [each for each in self._submissions if not each.begun]
            replaced: list[Submission[J]] = []
            while new and not self._fits([*new, submission]):
                by_client = Counter({each.client: 0 for each in new})
                for each in new:
                    by_client[each.client] += len(each)
                longest, most = by_client.most_common(1)[0]
                if by_client[submission.client] + len(submission) >= most:
                    break
                replaced.append(next(each for each in reversed(new) if each.client == longest))
                new.remove(replaced[-1])
            backlog, most_waiting = sum(len(each.fresh) for each in self._submissions if each.begun), self._limits.max_waiting
            crowded = len(submission) > 1 and self._waiting and backlog + len(submission) > _BACKLOG * most_waiting
            if (new and not self._fits([*new, submission])) or crowded:
                waiting, tokens = sum(map(len, new)) + backlog, sum(each.tokens for each in new)
                full = f"{waiting} requests with {tokens} prompt tokens wait, and the most is {most_waiting} requests"
                raise Overloaded(f"Model is overloaded: {full}", retry_after_s=retry_after_s)
            for each in replaced:
                self._drop(each)
            self._submissions[submission] = None
            self._waiting += len(submission)
            self.arrived = True
            self._changed.notify()
            return replaced

    def _fits(self, new: Sequence[Submission[J]]) -> bool:
        limits = self._limits
        return sum(map(len, new)) <= limits.max_waiting and sum(each.tokens for each in new) <= limits.max_waiting_tokens

    def cancel(self, run: Run) -> None:
        """Cancel a run. The engine's thread ends it before the next step."""
        with self._changed:
            self._cancelled.add(run)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def wait(self, *, busy: bool) -> bool:
        """Wait until there is work, or return at once if `busy`. Returns False if the queue is closed."""
        with self._changed:
            while not (busy or self._closed or self._cancelled or self._waiting):
                self._changed.wait()
            return not self._closed

    def cancelled(self) -> set[Run]:
        """Return the runs that were cancelled since the last call."""
        if not self._cancelled:  # read without the lock: a cancellation that is missed now is found at the next step
            return set()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    def waiting(self) -> list[J]:
        with self._changed:
            return [job for each in self._submissions for job in (*each.aside, *each.fresh)]

    def turn(self, now: float, holders: Sequence[J], *, free: int, quantum: int | None = None, room: bool = False) -> Turn[J] | None:
        """Remove and return the next job, and the job to be preempted for it if no slot is free. If fewer slots are free than the next job
        needs, no smaller job overtakes it.

        `holders` are the jobs that have slots. While other jobs wait, a holder keeps its slots for `quantum` tokens, unless its client has
        far more slots than its share. `quantum` None means that holders keep their slots until they end. `room` is True if one more job may
        be preempted. Returns None if no job can get slots now.
        """
        with self._changed:
            self.arrived = False
            table = Table(list(self._submissions), holders, free=free, quantum=quantum, room=room)
            decision = table.decide(now, fresh_first=self._turns % 2 == 0, bulk_delay_s=self._limits.bulk_delay_s)
            if decision is None:
                return None
            request, instead_of = decision
            return Turn(self._pop(request, None if quantum is None else now), instead_of)

    def set_aside(self, job: J, now: float) -> None:
        """Queue a preempted job, which has given back its slots."""
        with self._changed:
            submission = job.submission
            job.aside = True
            submission.aside.append(job)
            submission.since = now
            self._submissions[submission] = None
            self._waiting += 1
            self.aside += 1

    def overdue(self, now: float) -> list[tuple[Submission[J], QueueTooLong]]:
        """Remove and return, with their errors, the requests that have waited too long for their first slots."""
        with self._changed:
            late = [each for each in self._submissions if not each.begun and now - each.submitted > self._most_wait_s(each)]
            refused = [(each, self._too_late(each, now)) for each in late]
            for each in late:
                self._drop(each)
        return refused

    def _most_wait_s(self, submission: Submission[J]) -> float:
        return max(submission.most_wait_s, self._max_wait_s[submission.lane])

    def _too_late(self, submission: Submission[J], now: float) -> QueueTooLong:
        waited_s, work_s = now - submission.submitted, len(submission) * self._run_s
        wait_s = max(waited_s, work_s, 1.0)
        return QueueTooLong(
            f"Model is overloaded: the request has waited {waited_s:.2f} s for a slot and may wait {self._most_wait_s(submission):g} s",
            retry_after_s=self._bounds[submission.lane].promised_s(now, wait_s, submission.client, work_s),
        )

    def remove(self, job: J) -> None:
        """Remove a job from the queue. Does nothing if the job is not in the queue."""
        with self._changed:
            submission = job.submission
            if job in (where := submission.aside if job.aside else submission.fresh):
                where.remove(job)
                self._less(submission, job)

    def _pop(self, submission: Submission[J], since: float | None) -> J:
        job: J = (submission.aside or submission.fresh).popleft()
        self._less(submission, job)
        submission.begun = True
        if since is not None:
            submission.since = since
        self._turns += 1
        return job

    def _less(self, submission: Submission[J], job: J) -> None:
        self._waiting -= 1
        self.aside -= job.aside
        job.aside = False
        if not len(submission):
            del self._submissions[submission]

    def _drop(self, submission: Submission[J]) -> None:
        """Remove a request that has not started."""
        del self._submissions[submission]
        self._waiting -= len(submission)


@dataclass(frozen=True)
class Table(Generic[J]):
    """The runs of an engine when its slots are given away: the waiting requests in their order of arrival, and the jobs with slots."""

    waiting: Sequence[Submission[J]]
    holders: Sequence[J]
    free: int  # number of free slots
    quantum: int | None = None  # tokens for which a holder keeps its slots while others wait; None: until it ends
    room: bool = False  # whether one more job may be preempted, besides those that give their slots to a preempted job

    def decide(self, now: float, *, fresh_first: bool, bulk_delay_s: float) -> tuple[Submission[J], J | None] | None:
        """Return the request whose next job gets slots now, and the job that is preempted for it (None if enough slots are free). Returns
        None if no request gets slots. Changes nothing.

        `fresh_first` prefers requests that never had a slot, among those of equal lane and share.
        """
        clients, requests = Counter[str](), Counter[Submission[J]]()
        for holder in self.holders:
            clients[holder.request.client] += holder.slots
            requests[holder.submission] += holder.slots

        def lane(each: Submission[J]) -> Lane:
            return Lane.INTERACTIVE if now - each.since > bulk_delay_s else each.lane

        def rank(each: Submission[J]) -> tuple[Any, ...]:
            return lane(each), clients[each.client], requests[each], each.begun == fresh_first, each.since

        def excess(holder: J, each: Submission[J]) -> int:
            """Return how many slots more the holder's client has, or its request if both are of one client."""
            if holder.request.client == each.client:
                return requests[holder.submission] - requests[each]
            return clients[holder.request.client] - clients[each.client]

        def gives_way(holder: J, each: Submission[J], quantum: int) -> bool:
            if holder.submission is each or holder.request.lane < lane(each):
                return False
            if holder.request.lane > each.lane:
                return holder.gone_on >= _LEAST_HELD or clients[holder.request.client] > clients[each.client] + 1
            return (more := excess(holder, each)) > 1 or (more == 1 and holder.gone_on >= quantum)

        if self.free > 0 or self.quantum is None:
            first = min(self.waiting, key=rank, default=None)
            return None if first is None or (first.aside or first.fresh)[0].slots > self.free else (first, None)
        for each in heapq.nsmallest(_TRIED, (each for each in self.waiting if self.room or each.aside), key=rank):
            giving = [
                (holder.request.lane > lane(each), clients[holder.request.client], requests[holder.submission], holder.gone_on, at)
                for at, holder in enumerate(self.holders)
                if gives_way(holder, each, self.quantum)
            ]
            if giving:
                return each, self.holders[max(giving)[-1]]
        return None


def fair_share(wanted: Mapping[str, int], slots: int) -> dict[str, float]:
    """Divide the slots by max-min fairness: each client gets the slots that it wants, or an equal share of the slots that clients with
    smaller wishes leave.
    """
    shares: dict[str, float] = {}
    left = float(slots)
    for at, (client, count) in enumerate(sorted(wanted.items(), key=lambda each: each[1])):
        shares[client] = min(float(count), left / (len(wanted) - at))
        left -= shares[client]
    return shares


def stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")
