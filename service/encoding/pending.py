"""A request that waits for its results."""

import asyncio
from typing import Any

from service.encoding.request import EncodeTask, RowOrError


class PendingRequest:
    """A task with its results, which arrive in any order. `results[i]` is the output row of input i, or its error."""

    __slots__ = ("_done", "arrived", "cancelled", "queue_traced", "remaining", "results", "started", "task")

    def __init__(self, task: EncodeTask, arrived: float, done: "asyncio.Future[list[RowOrError]] | None" = None) -> None:
        """`done` gets the results after the last one."""
        self.task = task
        self.arrived = arrived
        self.results: list[Any] = [None] * len(task.inputs)
        self.remaining = len(task.inputs)
        self.started = False  # whether one of the request's inputs has been put into a batch
        self.queue_traced = False  # whether the request's trace contains the time in the queue
        self.cancelled = False  # whether its inputs leave the queue when their turn comes
        self._done = done

    def overdue(self, now: float, max_unstarted_s: float) -> bool:
        """Return whether the request has waited longer than `max_unstarted_s` without one of its inputs being put into a batch."""
        return not self.started and now - self.arrived > max_unstarted_s

    def set(self, index: int, result: RowOrError) -> None:
        self.results[index] = result
        self.remaining -= 1
        if self.task.on_row:
            self.task.on_row(index, result)
        if not self.remaining and self._done is not None and not self._done.done():
            self._done.set_result(self.results)
