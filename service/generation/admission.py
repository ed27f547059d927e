"""Between the event loop and the engine's thread: who waits for a slot, and what is wanted of those who have one.

Both sides come here, under one lock that is held for microseconds.
"""

import asyncio
import math
import threading
from collections import deque

from service.batching import Lane
from service.errors import InvalidRequest, NotReady, Overloaded
from service.generation.condition import Condition
from service.generation.run import Run
from service.generation.sequence import Sequence
from service.patience import Patience


class Admission:
    """Two lanes with a bound on runs, on the tokens of their prompts and, for whole requests, on the time that they would wait."""

    def __init__(
        self, *, max_waiting: int, max_waiting_tokens: int, max_wait_s: float, max_bulk_wait_s: float, bulk_delay_s: float
    ) -> None:
        self._max_waiting, self._max_tokens, self._bulk_delay_s = max_waiting, max_waiting_tokens, bulk_delay_s
        self._patience = (Patience(max_wait_s), Patience(max_bulk_wait_s))  # by lane
        self._changed = threading.Condition()
        self._lanes: dict[Lane, deque[Sequence]] = {lane: deque() for lane in Lane}
        self._tokens = 0
        self._left: set[Run] = set()
        self._taken: dict[Run, asyncio.Future[Condition]] = {}
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def check(self, lane: Lane, now: float, *, free: int, slot_s: float, token_s: float) -> None:
        """QueueTooLong when a request would wait too long for its first slot. `free` slots go to those who wait already, from then on one
        comes free every `slot_s`; a token of a prompt takes `token_s`."""
        with self._changed:
            before = [sequence for each in Lane if each <= lane for sequence in self._lanes[each]]
            tokens = sum(sequence.left_of_prompt for sequence in before)
            self._patience[lane].check(now, max(len(before) - free, 0) * slot_s + tokens * token_s, math.inf)

    def queue(self, sequence: Sequence, *, retry_after_s: float) -> None:
        """Raises Overloaded when there is no room, and NotReady when there will be none."""
        tokens = sequence.left_of_prompt
        with self._changed:
            if self._closed:
                raise stopping()
            waiting = len(self)
            if waiting >= self._max_waiting or (waiting and self._tokens + tokens > self._max_tokens):
                raise Overloaded(
                    f"Model is overloaded: {waiting} requests with {self._tokens} prompt tokens wait for a slot",
                    retry_after_s=retry_after_s,
                )
            self._lanes[sequence.request.lane].append(sequence)
            self._tokens += tokens
            self._changed.notify()

    def leave(self, run: Run) -> None:
        """Nobody wants this run any more."""
        with self._changed:
            self._left.add(run)
            self._changed.notify()

    def take(self, run: Run, future: "asyncio.Future[Condition]") -> None:
        """Somebody wants this run's condition. InvalidRequest when somebody else does already, NotReady when it is closed."""
        with self._changed:
            if self._closed:
                raise stopping()
            if run in self._taken:
                raise InvalidRequest("the run is being taken out already")
            self._taken[run] = future
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    # On the thread ---------------------------------------------------------------------------------------------------------------------

    def wait(self, *, busy: bool) -> bool:
        """Until there is something to do, at once for who is busy; False when it is closed."""
        with self._changed:
            while not (busy or self._closed or self._left or self._taken or len(self)):
                self._changed.wait()
            return not self._closed

    def wishes(self) -> tuple[set[Run], dict[Run, "asyncio.Future[Condition]"]]:
        """The runs that were left and those that are to be taken out, since the last time."""
        if not (self._left or self._taken):  # one look without the lock a step: what comes now is seen at the next
            return set(), {}
        with self._changed:
            left, self._left = self._left, set()
            taken, self._taken = self._taken, {}
        return left, taken

    def waiting(self) -> list[Sequence]:
        with self._changed:
            return [sequence for lane in self._lanes.values() for sequence in lane]

    def next(self, now: float) -> Sequence | None:
        """Whose turn it is: the interactive first, but for bulk that has waited long enough."""
        if not len(self):
            return None
        with self._changed:
            interactive, bulk = self._lanes[Lane.INTERACTIVE], self._lanes[Lane.BULK]
            overdue = bool(bulk) and now - bulk[0].run.usage.submitted > self._bulk_delay_s
            sequence = (bulk if overdue or not interactive else interactive).popleft()
            self._tokens -= sequence.left_of_prompt
            return sequence

    def remove(self, sequence: Sequence) -> None:
        """Does nothing for who does not wait."""
        with self._changed:
            if sequence in (lane := self._lanes[sequence.request.lane]):
                lane.remove(sequence)
                self._tokens -= sequence.left_of_prompt


def stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")
