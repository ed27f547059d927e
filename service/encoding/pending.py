"""Requests that wait for their results, until their deadlines."""

import asyncio
import math
import time
from typing import Any

from service.encoding.request import EncodeTask, OnResult, RowOrError
from service.errors import DeadlineExceeded, ServiceError

_LATE_S = 0.02  # a request may end so many seconds after its deadline


class PendingRequest:
    """A task with its results, which arrive in any order. `results[i]` is the output row of input i, or its error."""

    __slots__ = ("_done", "arrived", "cancelled", "deadlines", "queue_traced", "remaining", "results", "started", "task")

    def __init__(self, task: EncodeTask, arrived: float, done: OnResult | None = None) -> None:
        """`done` is called on the event loop after the last result, or with the error that ends the request before."""
        self.task = task
        self.arrived = arrived
        self.results: list[Any] = [None] * len(task.inputs)
        self.remaining = len(task.inputs)
        self.started = False  # whether one of the request's inputs has been put into a batch
        self.queue_traced = False  # whether the request's trace contains the time in the queue
        self.cancelled = False
        self.deadlines: Deadlines | None = None  # what ends the request at its deadline
        self._done = done

    def overdue(self, now: float, max_unstarted_s: float) -> bool:
        """Return whether the request has waited longer than `max_unstarted_s` without one of its inputs being put into a batch."""
        return not self.started and now - self.arrived > max_unstarted_s

    def cancel(self) -> None:
        """Drop the request. Its inputs leave the queue when their turn comes."""
        self.cancelled, self._done = True, None
        if self.deadlines is not None:
            self.deadlines.discard(self)

    def end(self, result: list[RowOrError] | ServiceError) -> None:
        """Call `done` with the result, unless the request was cancelled or has ended."""
        if (done := self._done) is not None:
            self.cancel()
            done(result)

    def set(self, index: int, result: RowOrError) -> None:
        self.results[index] = result
        self.remaining -= 1
        if self.task.on_row:
            self.task.on_row(index, result)
        if not self.remaining:
            self.end(self.results)


class Deadlines:
    """Ends requests with DeadlineExceeded soon after their deadlines. They share one timer, because a timer for each request would cost
    more than its place in the queue. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._pending: set[PendingRequest] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf  # when the timer rings
        self._looked = -math.inf  # when requests were last looked through

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: PendingRequest) -> None:
        self._pending.add(request)
        request.deadlines = self
        if request.task.deadline < self._at:
            self._set(request.task.deadline)

    def discard(self, request: PendingRequest) -> None:
        self._pending.discard(request)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at = max(at, self._looked + _LATE_S)
        self._timer = asyncio.get_running_loop().call_later(max(self._at - time.monotonic(), 0), self._end_overdue)

    def _end_overdue(self) -> None:
        self._timer, self._at, self._looked = None, math.inf, time.monotonic()
        overdue = [each for each in self._pending if each.task.deadline <= self._looked]
        try:
            for request in sorted(overdue, key=lambda each: each.task.deadline):
                request.end(DeadlineExceeded("the request's deadline passed before its answer was there"))
        finally:  # if a caller fails, the others end at the next look
            if self._pending:
                self._set(min(each.task.deadline for each in self._pending))
