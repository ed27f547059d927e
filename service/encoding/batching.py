"""Chooses the inputs that share one call of the runtime (a batch).

The first input of a batch is chosen by turn, the other inputs by length. Clients take turns, in an order that divides tokens fairly between
them (`fairness.py`). A turn is one input in the interactive lane, and a few seconds of work in the bulk lane. The first inputs of one
client's turns keep their order of arrival. Other inputs join the batch, nearest length first, as long as the padding that they add costs
less than a runtime call of their own. A runtime call has a fixed cost, because it reads all weights however short the input is. This cost
is measured at start, as the number of padding tokens that take the same time. There is no timer. A free thread takes a batch of the
inputs that are queued at that moment.

Interactive inputs are taken before bulk inputs, with two exceptions. A bulk input is taken first if both its arrival and the last bulk
batch were more than `bulk_delay_s` before the arrival of the first interactive input. It is also taken first if 3 * `max_batch_tokens`
of interactive work were taken since the last bulk batch. So bulk work delays interactive work by one batch every `bulk_delay_s` (under
overload by one batch in four), and bulk work never starves.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from service.encoding.pending import PendingRequest
from service.runtime.fairness import FairOrder
from service.runtime.lanes import Lane

BULK_SHARE = 4  # while bulk work waits, it gets at least one of every BULK_SHARE tokens, even if interactive work waits too


@dataclass(slots=True, eq=False)
class QueuedInput:
    """One input in the queue. Several requests may wait for the same input."""

    ids: list[int]
    type_ids: list[int] | None
    outputs: tuple[str, ...]
    lane: Lane
    arrived: float
    keys: tuple[bytes, ...]  # one for each output
    waiters: list[tuple[PendingRequest, int]]  # each request, and the index of this input in that request
    client: str = ""
    taken: bool = False
    unattended: int = 0

    def needed(self, now: float, max_unstarted_s: float = math.inf) -> bool:
        """Return whether any request still waits for this input. A request that is cancelled, overdue or past its deadline does not."""
        return any(not each.cancelled and now < each.task.deadline and not each.overdue(now, max_unstarted_s) for each, _ in self.waiters)

    def start(self) -> None:
        for request, _ in self.waiters:
            request.started = True


@dataclass
class BatchingQueue:
    """A queue of inputs in two lanes. Not thread-safe, so its owner must hold a lock. `tokens` includes the inputs of cancelled requests,
    until their turn comes and they are removed.
    """

    max_batch_tokens: int
    run_cost_tokens: float
    bulk_delay_s: float
    bulk_turn_tokens: float = 0.0  # size of a client's turn in the bulk lane; 0: one input is one turn
    short_tokens: int = 0  # inputs of up to so many tokens have a graph of their own, so a batch has only such inputs or none of them
    lanes: tuple["_LaneQueue", "_LaneQueue"] = field(init=False)
    bulk_began: float = -math.inf  # time at which the last bulk input was taken
    drawn_since_bulk: int = 0  # interactive tokens taken since the last bulk batch
    max_unstarted_s: float = math.inf  # an interactive request is dropped if none of its inputs is taken within this time

    def __post_init__(self) -> None:
        self.lanes = _LaneQueue(), _LaneQueue(self.bulk_turn_tokens)

    def __len__(self) -> int:
        return sum(lane.size for lane in self.lanes)

    @property
    def tokens(self) -> int:
        return sum(lane.tokens for lane in self.lanes)

    def tokens_before(self, lane: Lane) -> int:
        """Return the number of queued tokens that are taken before an input that arrives in this lane now. Bulk batches that are taken
        between interactive ones are not counted."""
        return self.tokens if lane == Lane.BULK else self.lanes[lane].tokens

    def put(self, item: QueuedInput) -> None:
        self.lanes[item.lane].put(item)

    def take(self, now: float, most_tokens: float = math.inf) -> tuple[list[QueuedInput], list[QueuedInput]]:
        """Remove the next batch from the queue. Inputs join the first one while the batch has at most `most_tokens` tokens, with padding,
        and at most `max_batch_tokens`. Returns the batch, and the inputs that were dropped because no request waits for them.
        """
        most_tokens = min(most_tokens, self.max_batch_tokens)
        dropped: list[QueuedInput] = []
        head = self._oldest(now, dropped)
        if head is None:
            return [], dropped
        lane = self.lanes[head.lane]
        batch, longest = [head], len(head.ids)
        while (length := self._joining(lane, longest, len(batch), most_tokens)) is not None:
            item = lane.take(lane.first(length))
            if self._needed(item, now):
                item.start()
                batch.append(item)
                longest = max(longest, length)
            else:
                dropped.append(item)
        self.drawn_since_bulk = 0 if head.lane == Lane.BULK else self.drawn_since_bulk + sum(len(item.ids) for item in batch)
        return batch, dropped

    def _oldest(self, now: float, dropped: list[QueuedInput]) -> QueuedInput | None:
        while len(self):
            lane = self.lanes[self._next_lane()]
            item = lane.take(lane.head())
            if self._needed(item, now):
                item.start()
                if item.lane == Lane.BULK:
                    self.bulk_began = now
                return item
            dropped.append(item)
        return None

    def max_unstarted_of(self, lane: Lane) -> float:
        return math.inf if lane == Lane.BULK else self.max_unstarted_s

    def _needed(self, item: QueuedInput, now: float) -> bool:
        return item.needed(now, self.max_unstarted_of(item.lane))

    def _next_lane(self) -> Lane:
        interactive, bulk = self.lanes
        if not (interactive.size and bulk.size):
            return Lane.INTERACTIVE if interactive.size else Lane.BULK
        if self.drawn_since_bulk >= (BULK_SHARE - 1) * self.max_batch_tokens:
            return Lane.BULK
        due = max(bulk.head().arrived, self.bulk_began) + self.bulk_delay_s
        return Lane.BULK if due < interactive.head().arrived else Lane.INTERACTIVE

    def _joining(self, lane: "_LaneQueue", longest: int, count: int, most_tokens: float) -> int | None:
        """Return the length of the input that should join a batch of `count` inputs, which are padded to `longest`. It is the one that adds
        the least padding. None if no queued input should join.
        """
        best, best_padding = None, self.run_cost_tokens
        for length in lane.around(longest):
            if (length <= self.short_tokens) != (longest <= self.short_tokens):
                continue
            padding = longest - length if length <= longest else (length - longest) * count
            if padding <= best_padding and max(length, longest) * (count + 1) <= most_tokens:
                best, best_padding = length, padding
        return best


class _LaneQueue:
    """The queued inputs of one lane, ordered both by turn and by length."""

    def __init__(self, turn_tokens: float = 0.0) -> None:
        self.size = 0
        self.tokens = 0
        self._turn_tokens = turn_tokens
        self.by_client: dict[str, int] = {}  # client -> queued tokens; inputs without a client have the key ""
        self._order = FairOrder(turn_tokens)
        self._numbers = itertools.count()
        self._by_turn: list[_Turn] = []  # a heap; an input that was taken by its length stays in this heap until it comes first
        self._by_length: dict[int, list[_Turn]] = {}  # length -> heap of the inputs of this length
        self._lengths: list[int] = []  # the keys of _by_length, sorted

    def put(self, item: QueuedInput) -> None:
        length = len(item.ids)
        turn = self._order.tag(item.client, length), next(self._numbers), item
        if length not in self._by_length:
            self._by_length[length] = []
            bisect.insort(self._lengths, length)
        heapq.heappush(self._by_length[length], turn)
        heapq.heappush(self._by_turn, turn)
        self.size += 1
        self.tokens += length
        self.by_client[item.client] = self.by_client.get(item.client, 0) + length

    def head(self) -> QueuedInput:
        while self._by_turn[0][2].taken:
            heapq.heappop(self._by_turn)
        return self._by_turn[0][2]

    def first(self, length: int) -> QueuedInput:
        return self._by_length[length][0][2]

    def around(self, length: int) -> Iterator[int]:
        """Yield the queued lengths next to `length`: the longest that is at most `length`, and the shortest that is longer."""
        at = bisect.bisect_right(self._lengths, length)
        yield from self._lengths[max(at - 1, 0) : at + 1]

    def ahead(self, client: str, tokens: int) -> int:
        """Return how many queued tokens are processed before `tokens` new tokens of `client`. They are all queued tokens of `client`,
        and of every other client at most as many as `client` would then have. Inputs without a client count in full.
        """
        own = self.by_client.get(client, 0)
        return own + sum(min(queued, own + tokens) if other else queued for other, queued in self.by_client.items() if other != client)

    def capped(self, most: float) -> float:
        """Return the number of queued tokens, counting at most `most` for each client. Inputs without a client count in full."""
        return sum(min(queued, most) if client else queued for client, queued in self.by_client.items())

    def take(self, item: QueuedInput) -> QueuedInput:
        """Remove and return an input, which must be the first queued input of its length, as the head of a lane always is."""
        length = len(item.ids)
        bucket = self._by_length[length]
        tag, _, first = heapq.heappop(bucket)
        assert first is item
        if not bucket:
            del self._by_length[length]
            self._lengths.remove(length)
        if item is self._by_turn[0][2]:
            heapq.heappop(self._by_turn)
            self._order.served(tag)
        item.taken = True
        self.size -= 1
        self.tokens -= length
        self.by_client[item.client] -= length
        if not self.by_client[item.client]:
            del self.by_client[item.client]
        if not self.size:
            self._by_turn.clear()
            self._order = FairOrder(self._turn_tokens)
        return item


_Turn = tuple[float, int, QueuedInput]
