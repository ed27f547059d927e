"""Between the event loop and the engine's thread: runs that wait for a slot, their order, and requests about runs that have one.

Slots are shared by client, and within a client by request. A free slot goes to the client with the fewest. If none is free, a client
that has two more than the waiting one gives one back at once; a client that has one more gives it back after a quantum. So slots rotate
if there are more clients, or more requests of a client, than slots, and a run without competition keeps its slot. Requests that never had
a slot and those that gave one back alternate, so neither kind starves the other.

Both sides come here, under one lock that is held for microseconds.
"""

import asyncio
import heapq
import math
import threading
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple

from service.errors import InvalidRequest, NotReady, Overloaded, QueueTooLong
from service.generation.run import Run
from service.generation.sequence import Asked, Sequence
from service.generation.snapshot import Snapshot
from service.overload.queue_bound import QueueBound
from service.runtime.lanes import Lane

_BACKLOG = 16  # times `max_waiting`: limit on runs without a slot, of requests that have started
_LEAST_HELD = 16  # tokens that a bulk run draws before it gives way to interactive work
_TRIED = 8  # requests at the front for which a slot is sought


class Turn(NamedTuple):
    """A run that gets a slot, and the run that gives it up; None if one is free."""

    run: Sequence
    instead_of: Sequence | None


class Wanted(NamedTuple):
    """A snapshot that a caller waits for."""

    future: "asyncio.Future[Snapshot]"
    ends: bool  # whether the run ends with it


class Holding(NamedTuple):
    """Slots, as the event loop sees them."""

    slots: int
    by_client: Mapping[str, int]
    turn_s: float  # the longest time that a run keeps its slot while others wait

    @property
    def free(self) -> int:
        return self.slots - sum(self.by_client.values())


class Admission:
    """Requests in two lanes, with a bound on their runs, on the tokens of their prompts and on how long each waits for its first slot."""

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, max_wait_s: float, max_bulk_wait_s: float, bulk_delay_s: float
    ) -> None:
        self._max_waiting, self._max_tokens, self._bulk_delay_s = max_waiting, max_waiting_tokens, bulk_delay_s
        self._max_wait_s = {Lane.INTERACTIVE: max_wait_s, Lane.BULK: max_bulk_wait_s}
        self._bounds = {lane: QueueBound(bound_s) for lane, bound_s in self._max_wait_s.items()}
        self._changed = threading.Condition()
        self._asked: dict[Asked, None] = {}  # requests with a run without a slot, in order of arrival
        self._waiting = 0  # the number of these runs
        self._turns = 0
        self._left: set[Run] = set()
        self._wanted: dict[Run, Wanted] = {}
        self._closed = False
        self.aside = 0  # runs that gave back their slot
        self.arrived = False  # whether a request arrived since the thread last looked

    def __len__(self) -> int:
        return self._waiting

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def check(self, client: str, lane: Lane, now: float, holding: Holding) -> None:
        """Raise QueueTooLong if a request of this client would wait too long for its first slot, behind the requests before it."""
        with self._changed:
            before = Counter(asked.client for asked in self._asked if asked.lane <= lane and not asked.begun)
            behind = Counter(asked.client for asked in self._asked if asked.lane <= lane and asked.begun)
            wanted = Counter(holding.by_client)
            for asked in self._asked:
                wanted[asked.client] += len(asked)
        if before.total() < holding.free:
            return
        wanted[client] += 1
        share = fair_share(wanted, holding.slots)[client]
        if share >= 1:  # whatever others have, it gets these
            ahead, slots = max(before[client] - max(int(share) - holding.by_client.get(client, 0), 0), 0), share
            ahead += min(behind[client], ahead)  # which take turns with them
        else:
            ahead, slots = sum(min(count, before[client] + 1) for count in before.values()), holding.slots
            ahead += min(behind.total(), ahead)
        self._bounds[lane].check(now, ahead * holding.turn_s / slots, math.inf)

    def queue(self, asked: Asked, *, retry_after_s: float) -> list[Asked]:
        """Queue a request with all its runs. Returns the requests that it replaces: their client has more runs here. An empty queue
        admits any request. Raises Overloaded if there is no room, and NotReady if the engine is closed."""
        with self._changed:
            if self._closed:
                raise stopping()
            new = [each for each in self._asked if not each.begun]
            gone: list[Asked] = []
            while new and not self._fits([*new, asked]):
                by_client = Counter({each.client: 0 for each in new})
                for each in new:
                    by_client[each.client] += len(each)
                longest, most = by_client.most_common(1)[0]
                if by_client[asked.client] + len(asked) >= most:
                    break
                gone.append(next(each for each in reversed(new) if each.client == longest))
                new.remove(gone[-1])
            backlog = sum(len(each.fresh) for each in self._asked if each.begun)
            if (new and not self._fits([*new, asked])) or (len(asked) > 1 and backlog + len(asked) > _BACKLOG * self._max_waiting):
                waiting, tokens = sum(map(len, new)) + backlog, sum(each.tokens for each in new)
                raise Overloaded(
                    f"Model is overloaded: {waiting} requests with {tokens} prompt tokens wait for a slot", retry_after_s=retry_after_s
                )
            for each in gone:
                self._drop(each)
            self._asked[asked] = None
            self._waiting += len(asked)
            self.arrived = True
            self._changed.notify()
            return gone

    def _fits(self, new: Several[Asked]) -> bool:
        return sum(map(len, new)) <= self._max_waiting and sum(each.tokens for each in new) <= self._max_tokens

    def leave(self, run: Run) -> None:
        """The client no longer wants this run."""
        with self._changed:
            self._left.add(run)
            self._changed.notify()

    def want(self, run: Run, wanted: Wanted) -> None:
        """Ask for a run's snapshot. InvalidRequest if another caller waits for one already, NotReady if the engine is closed."""
        with self._changed:
            if self._closed:
                raise stopping()
            if run in self._wanted:
                raise InvalidRequest("a snapshot of the run is being made already")
            self._wanted[run] = wanted
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def wait(self, *, busy: bool) -> bool:
        """Wait for work; do not wait if `busy`. False if it is closed."""
        with self._changed:
            while not (busy or self._closed or self._left or self._wanted or self._waiting):
                self._changed.wait()
            return not self._closed

    def wishes(self) -> tuple[set[Run], dict[Run, Wanted]]:
        """The runs that were cancelled, and the snapshots that were asked for, since the last call."""
        if not (self._left or self._wanted):  # one look without the lock a step: what comes now is seen at the next
            return set(), {}
        with self._changed:
            left, self._left = self._left, set()
            wanted, self._wanted = self._wanted, {}
        return left, wanted

    def waiting(self) -> list[Sequence]:
        with self._changed:
            return [run for asked in self._asked for run in (*asked.aside, *asked.fresh)]

    def turn(self, now: float, holders: Several[Sequence], *, free: bool, quantum: int, room: bool) -> Turn | None:
        """The run that is next, if any. `holders` have slots; a run keeps its slot for `quantum` tokens, unless its client has far more
        than its share. `room`: one more run may be set aside."""
        with self._changed:
            self.arrived = False
            clients = Counter(holder.request.client for holder in holders)
            requests = Counter(holder.asked for holder in holders)
            fresh_first = self._turns % 2 == 0

            def rank(asked: Asked) -> tuple[int, int, int, bool, float]:
                return (self._lane(asked, now), clients[asked.client], requests[asked], asked.begun == fresh_first, asked.since)

            if free:
                chosen = min(self._asked, key=rank, default=None)
                return None if chosen is None else Turn(self._pop(chosen, now), None)
            for asked in heapq.nsmallest(_TRIED, (each for each in self._asked if room or each.aside), key=rank):
                giving = [
                    (
                        holder.request.lane > self._lane(asked, now),
                        clients[holder.request.client],
                        requests[holder.asked],
                        holder.gone_on,
                        at,
                    )
                    for at, holder in enumerate(holders)
                    if self._gives_way(holder, asked, self._lane(asked, now), clients, requests, quantum)
                ]
                if giving:
                    return Turn(self._pop(asked, now), holders[max(giving)[-1]])
            return None

    def _lane(self, asked: Asked, now: float) -> Lane:
        """The lane of a request; bulk work that has been passed for long enough counts as interactive."""
        return Lane.INTERACTIVE if now - asked.since > self._bulk_delay_s else asked.lane

    def _gives_way(
        self, holder: Sequence, asked: Asked, lane: Lane, clients: Mapping[str, int], requests: Mapping[Asked, int], quantum: int
    ) -> bool:
        if holder.asked is asked or holder.request.lane < lane:
            return False
        if holder.request.lane > asked.lane:
            return holder.gone_on >= _LEAST_HELD or clients[holder.request.client] > clients[asked.client] + 1
        if holder.request.client == asked.client:
            more = requests[holder.asked] - requests[asked]
        else:
            more = clients[holder.request.client] - clients[asked.client]
        return more > 1 or (more == 1 and holder.gone_on >= quantum)

    def set_aside(self, sequence: Sequence, now: float) -> None:
        """Queue a run that has given back its slot."""
        with self._changed:
            sequence.aside = True
            sequence.asked.aside.append(sequence)
            sequence.asked.since = now
            self._asked[sequence.asked] = None
            self._waiting += 1
            self.aside += 1

    def overdue(self, now: float) -> list[tuple[Asked, QueueTooLong]]:
        """Remove and return requests that had no slot for longer than they may wait, with their errors."""
        with self._changed:
            late = [asked for asked in self._asked if not asked.begun and now - asked.submitted > self._max_wait_s[asked.lane]]
            for asked in late:
                self._drop(asked)
        return [(asked, _too_late(now - asked.submitted, self._max_wait_s[asked.lane])) for asked in late]

    def remove(self, sequence: Sequence) -> None:
        """Does nothing for a run that does not wait."""
        with self._changed:
            asked = sequence.asked
            if sequence in (where := asked.aside if sequence.aside else asked.fresh):
                where.remove(sequence)
                self._less(asked, sequence)

    def _pop(self, asked: Asked, now: float) -> Sequence:
        sequence = (asked.aside or asked.fresh).popleft()
        self._less(asked, sequence)
        asked.begun, asked.since = True, now
        self._turns += 1
        return sequence

    def _less(self, asked: Asked, sequence: Sequence) -> None:
        self._waiting -= 1
        self.aside -= sequence.aside
        sequence.aside = False
        if not len(asked):
            del self._asked[asked]

    def _drop(self, asked: Asked) -> None:
        """Remove a request that has not started."""
        del self._asked[asked]
        self._waiting -= len(asked)


def fair_share(wanted: Mapping[str, int], slots: int) -> dict[str, float]:
    """Fair slots of each client: as many as it wants, unless a client that wants more has fewer."""
    shares: dict[str, float] = {}
    left = float(slots)
    for at, (client, count) in enumerate(sorted(wanted.items(), key=lambda each: each[1])):
        shares[client] = min(float(count), left / (len(wanted) - at))
        left -= shares[client]
    return shares


def _too_late(waited_s: float, bound_s: float) -> QueueTooLong:
    return QueueTooLong(
        f"Model is overloaded: the request has waited {waited_s:.2f} s for a slot and may wait {bound_s:g} s",
        retry_after_s=max(waited_s, 1.0),
    )


def stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")
