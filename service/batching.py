"""Which inputs share one call of the runtime.

The queue is ordered by arrival and drawn by length. The input that has waited longest opens a batch; others join it, nearest length first,
as long as the padding they add costs less than a run of their own would. That price of a run, counted in tokens, is a property of model and
machine (a run streams all weights through the core once, however short the input) and is measured at start. No timer is involved: a batch
is what is there when a worker is free.

Two lanes: interactive work passes bulk work, whose head is drawn as if it had come `bulk_delay_s` later than it did, and later than the
last bulk batch began. So a long bulk request delays what comes after it by one batch every `bulk_delay_s`, and is never passed for good.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Lane(IntEnum):
    INTERACTIVE = 0
    BULK = 1


@dataclass(slots=True)
class Spent:
    """Seconds the inputs of one request waited and were computed, summed over the inputs. What the cache knew took none."""

    queue_s: float = 0.0
    inference_s: float = 0.0


class Work:
    """What one request waits for: a result an input, arriving in any order.

    `results[i]` is a row of the output or the exception that befell input i. `on_result(i)` is called for each as it arrives and
    `on_done()` after the last, both on the event loop.
    """

    __slots__ = (
        "arrived",
        "begun",
        "cancelled",
        "deadline",
        "drawn",
        "on_done",
        "on_result",
        "remaining",
        "results",
        "spent",
        "traceparent",
    )

    def __init__(
        self, size: int, deadline: float, arrived: float = 0.0, spent: Spent | None = None, traceparent: str | None = None
    ) -> None:
        self.results: list[Any] = [None] * size
        self.remaining = size
        self.deadline = deadline
        self.arrived = arrived
        self.spent = spent or Spent()
        self.traceparent = traceparent  # None: not traced
        self.begun = False  # one of its inputs was drawn
        self.drawn = False  # and said so in its trace
        self.cancelled = False
        self.on_result: Any = None
        self.on_done: Any = None

    def tired(self, now: float, patience_s: float) -> bool:
        """Nothing of it was begun for longer than that."""
        return not self.begun and now - self.arrived > patience_s

    def set(self, index: int, result: Any) -> None:
        self.results[index] = result
        self.remaining -= 1
        if self.on_result:
            self.on_result(index)
        if not self.remaining and self.on_done:
            self.on_done()


@dataclass(slots=True, eq=False)
class Item:
    """One input in the queue. Several requests may wait for the same one."""

    ids: list[int]
    type_ids: list[int] | None
    output: str
    lane: Lane
    arrived: float
    key: bytes
    waiters: list[tuple[Work, int]]
    taken: bool = False

    def wanted(self, now: float, patience_s: float = math.inf) -> bool:
        """Somebody is still there to receive it in time, and has not waited too long for the first of its inputs."""
        return any(not work.cancelled and now < work.deadline and not work.tired(now, patience_s) for work, _ in self.waiters)

    def begin(self) -> None:
        for work, _ in self.waiters:
            work.begun = True


@dataclass
class Queue:
    """Not thread-safe: its owner holds a lock. `tokens` counts what is queued, cancelled items included until they are met."""

    max_batch_tokens: int
    run_cost_tokens: float
    bulk_delay_s: float
    lanes: tuple["_Lane", "_Lane"] = field(default_factory=lambda: (_Lane(), _Lane()))
    bulk_began: float = -math.inf  # when a bulk batch was last drawn
    patience_s: float = math.inf  # an interactive request of which nothing was begun for so long is dropped

    def __len__(self) -> int:
        return sum(lane.size for lane in self.lanes)

    @property
    def tokens(self) -> int:
        return sum(lane.tokens for lane in self.lanes)

    def tokens_before(self, lane: Lane) -> int:
        """What is drawn, but for the few bulk batches, before an input that comes into this lane now."""
        return self.tokens if lane == Lane.BULK else self.lanes[lane].tokens

    def put(self, item: Item) -> None:
        self.lanes[item.lane].put(item)

    def take(self, now: float) -> tuple[list[Item], list[Item]]:
        """The next batch, all of it removed from the queue, and the items dropped on the way because nobody wants them any more."""
        dropped: list[Item] = []
        head = self._oldest(now, dropped)
        if head is None:
            return [], dropped
        lane = self.lanes[head.lane]
        batch, longest = [head], len(head.ids)
        while (length := self._joining(lane, longest, len(batch))) is not None:
            item = lane.take(lane.first(length))
            if self._wanted(item, now):
                item.begin()
                batch.append(item)
                longest = max(longest, length)
            else:
                dropped.append(item)
        return batch, dropped

    def _oldest(self, now: float, dropped: list[Item]) -> Item | None:
        while len(self):
            lane = self.lanes[self._next_lane()]
            item = lane.take(lane.head())
            if self._wanted(item, now):
                item.begin()
                if item.lane == Lane.BULK:
                    self.bulk_began = now
                return item
            dropped.append(item)
        return None

    def patience_of(self, lane: Lane) -> float:
        return math.inf if lane == Lane.BULK else self.patience_s

    def _wanted(self, item: Item, now: float) -> bool:
        return item.wanted(now, self.patience_of(item.lane))

    def _next_lane(self) -> Lane:
        interactive, bulk = self.lanes
        if not (interactive.size and bulk.size):
            return Lane.INTERACTIVE if interactive.size else Lane.BULK
        due = max(bulk.head().arrived, self.bulk_began) + self.bulk_delay_s
        return Lane.BULK if due < interactive.head().arrived else Lane.INTERACTIVE

    def _joining(self, lane: "_Lane", longest: int, count: int) -> int | None:
        """The queued length that joins a batch of `count` inputs padded to `longest` at the least padding; None if none pays."""
        best, best_padding = None, self.run_cost_tokens
        for length in lane.around(longest):
            padding = longest - length if length <= longest else (length - longest) * count
            if padding <= best_padding and max(length, longest) * (count + 1) <= self.max_batch_tokens:
                best, best_padding = length, padding
        return best


class _Lane:
    """Items by arrival and, at the same time, by length."""

    def __init__(self) -> None:
        self.size = 0
        self.tokens = 0
        self._by_arrival: deque[Item] = deque()  # items taken by length stay here until they come up
        self._by_length: dict[int, deque[Item]] = {}
        self._lengths: list[int] = []  # the keys of _by_length, sorted

    def put(self, item: Item) -> None:
        length = len(item.ids)
        if length not in self._by_length:
            self._by_length[length] = deque()
            bisect.insort(self._lengths, length)
        self._by_length[length].append(item)
        self._by_arrival.append(item)
        self.size += 1
        self.tokens += length

    def head(self) -> Item:
        while self._by_arrival[0].taken:
            self._by_arrival.popleft()
        return self._by_arrival[0]

    def first(self, length: int) -> Item:
        return self._by_length[length][0]

    def around(self, length: int) -> Iterator[int]:
        """The queued lengths next to `length`: the nearest that is not longer, and the nearest that is."""
        at = bisect.bisect_right(self._lengths, length)
        yield from self._lengths[max(at - 1, 0) : at + 1]

    def take(self, item: Item) -> Item:
        """Remove an item that is the first of its length (the oldest of a lane always is)."""
        length = len(item.ids)
        bucket = self._by_length[length]
        assert bucket[0] is item
        bucket.popleft()
        if not bucket:
            del self._by_length[length]
            self._lengths.remove(length)
        item.taken = True
        self.size -= 1
        self.tokens -= length
        if not self.size:
            self._by_arrival.clear()
        return item
