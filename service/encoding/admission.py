"""Admission to the queue of one engine, the batches drawn from it, and the rate at which it is processed.

It has no thread and no clock: the owner holds a lock and passes the time, so a test can play everything through.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.encoding.batching import BULK_SHARE, Item, Queue
from service.errors import DeadlineExceeded, NeverFits, Overloaded, QueueTooLong
from service.runtime.lanes import Lane
from service.runtime.offered import Offered
from service.runtime.overload import Patience

_RATE_MEMORY = 0.9  # weight of the past in the moving average of tokens a second
_TIRED = 3.0  # times as long as the queue may stand: what has waited longer was there before it had to be so short
# Of `max_batch_tokens`, under overload. An admitted request waits for the current run and for its own, so runs are short, and the queue is
# no longer than one of them.
_SHORT_RUNS, _BUSY = 0.5, 0.25
# A client's turn of bulk work, as a part of the tokens that are computed in `max_bulk_wait_s`. A request of at most one turn is computed
# whole before the next one.
_BULK_TURN = 1 / 8
_SMALL = 1 / 8  # of `max_batch_tokens`: queued tokens of one client beyond this do not count as a crowd


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Bounds of one engine, all in tokens or seconds. `tokens_per_s` and `run_cost_tokens` are as measured at start."""

    max_queue_tokens: int = 524_288
    max_batch_tokens: int = 512
    run_cost_tokens: float = 16.0
    tokens_per_s: float = 5_000.0
    bulk_delay_s: float = 2.0
    concurrent_runs: int = 1
    max_wait_s: float = 1.0
    max_bulk_wait_s: float = 30.0


@dataclass(frozen=True)
class Draw:
    """A batch for one run, what was dropped on the way to it, and whether it is alone or leaves others in the queue."""

    batch: list[Item]
    dropped: list[Item]
    alone: bool
    leaves_some: bool

    @property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.batch)


class Admission:
    """The queue with its bounds in tokens and in time."""

    def __init__(self, limits: EngineLimits, offered: Offered | None = None) -> None:
        self.limits = limits
        self.offered = offered or Offered()
        turn_tokens = _BULK_TURN * limits.max_bulk_wait_s * limits.tokens_per_s
        self.queue = Queue(limits.max_batch_tokens, limits.run_cost_tokens, limits.bulk_delay_s, turn_tokens)
        self.tokens_per_s = limits.tokens_per_s  # of all runs side by side, moving average
        self._running = self._running_tokens = 0
        self._patience = (Patience(limits.max_wait_s), Patience(limits.max_bulk_wait_s))  # by lane
        self._request_tokens = [0.0, 0.0]  # of a request, by lane, moving average
        # Bulk work has what interactive work leaves: seconds between two of its tokens, moving average, and when the last one was drawn.
        self._bulk_token_s = 0.0
        self._bulk_drawn = 0.0

    @property
    def tokens(self) -> int:
        """Queued or running."""
        return self.queue.tokens + self._running_tokens

    @property
    def busy_s(self) -> float:
        """Seconds of queued work that keep every thread busy and fit into one short run."""
        return _BUSY * self.limits.max_batch_tokens / self.tokens_per_s

    def check(self, lane: Lane, now: float, client: str = "") -> None:
        """Raise QueueTooLong if this lane has no room for another request of this client. Its tokens are not counted yet."""
        try:
            self._check(lane, now, client, 1)
        except QueueTooLong:
            if self._crowded(lane, now):
                self._came(lane, now, self._request_tokens[lane])
            self._refused(self._request_tokens[lane])
            raise

    def _refused(self, tokens: float) -> None:
        if self.offered.counts_refusals:
            self.offered.add(tokens / self.tokens_per_s)

    def _came(self, lane: Lane, now: float, tokens: float) -> None:
        if lane == Lane.INTERACTIVE:  # bulk work may arrive far faster than it is done: its long queue is meant for that
            self._patience[lane].inflow.came(now, tokens / self.tokens_per_s)

    def _check(self, lane: Lane, now: float, client: str, tokens: int) -> None:
        patience, queue = self._patience[lane], self.queue.lanes[lane]
        before = self.queue.tokens_before(lane)
        queue_s = before / self.tokens_per_s
        if lane == Lane.BULK:
            queue_s = max(queue_s, queue.tokens * self._bulk_pace_s(now))
        if queue_s <= patience.bound_s(now, self.busy_s):  # the clients need not be compared
            return
        if client:
            ahead = queue.ahead(client, tokens)
            queue_s = (before - queue.tokens + ahead) / self.tokens_per_s
            if lane == Lane.BULK:
                queue_s = max(queue_s, ahead * self._bulk_pace_s(now))
        patience.check(now, queue_s, self.busy_s, crowded=self._crowded(lane, now))

    def _bulk_pace_s(self, now: float) -> float:
        """Seconds for each queued token of bulk work: as measured, and under an overload of interactive work no less than by the
        guaranteed share, since the measured pace follows an overload only slowly."""
        least = BULK_SHARE / self.tokens_per_s if self._patience[Lane.INTERACTIVE].standing(now) else 0.0
        return max(self._bulk_token_s, least)

    def _crowded(self, lane: Lane, now: float) -> bool:
        """Whether a small request of a new client would wait too long as well. Otherwise a few clients alone ask for too much."""
        waits_s = self.queue.lanes[lane].crowd(_SMALL * self.limits.max_batch_tokens) / self.tokens_per_s
        return waits_s > self._patience[lane].bound_s(now, self.busy_s)

    def put(self, items: Sequence[Item], lane: Lane, now: float, deadline: float) -> None:
        """All of them or none, with Overloaded, NeverFits or DeadlineExceeded."""
        tokens, limit = sum(len(item.ids) for item in items), self.limits.max_queue_tokens
        client = items[0].client if items else ""
        if tokens > limit:
            raise NeverFits(f"the request has {tokens} tokens and the queue holds {limit}: send it in parts")
        if not items:
            return
        if (left_s := deadline - now) <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was queued")
        mean = self._request_tokens[lane] or tokens
        self._request_tokens[lane] = _RATE_MEMORY * mean + (1 - _RATE_MEMORY) * tokens
        try:
            self._enter(tokens, client, lane, now, left_s)
        except Overloaded:
            self._refused(tokens)
            raise
        self.offered.add(tokens / self.tokens_per_s)
        if lane == Lane.BULK and not self.queue.lanes[lane].size:
            self._bulk_token_s, self._bulk_drawn = 1 / self.tokens_per_s, now
        for item in items:
            self.queue.put(item)

    def _enter(self, tokens: int, client: str, lane: Lane, now: float, left_s: float) -> None:
        """Overloaded where a request of so many tokens finds no room, or none in time."""
        limit = self.limits.max_queue_tokens
        try:
            self._check(lane, now, client, tokens)
        except QueueTooLong:
            if self._crowded(lane, now):
                self._came(lane, now, tokens)
            raise
        self._came(lane, now, tokens)
        if (excess := self.queue.tokens + tokens - limit) > 0:
            raise Overloaded(
                f"Model is overloaded: {self.queue.tokens} of {limit} tokens are queued and the request has {tokens}",
                retry_after_s=excess / self.tokens_per_s,
            )
        if (wait_s := (self.queue.tokens_before(lane) + self._running_tokens) / self.tokens_per_s) > left_s:
            raise Overloaded(
                f"Model is overloaded: the queue needs about {wait_s:.2f} s and the request gives it {left_s:.2f} s",
                retry_after_s=wait_s - left_s,
            )

    def take(self, now: float) -> Draw:
        """The next batch; `ended` is to be called when its run has."""
        standing = self._patience[Lane.INTERACTIVE].standing(now)
        self.queue.patience_s = _TIRED * self.busy_s if standing else math.inf
        self.queue.max_batch_tokens = int(self.limits.max_batch_tokens * (_SHORT_RUNS if standing else 1))
        batch, dropped = self.queue.take(now)
        draw = Draw(batch, dropped, alone=not self._running and not len(self.queue), leaves_some=len(self.queue) > 0)
        if batch:
            self._patience[batch[0].lane].inflow.begun(draw.tokens / self.tokens_per_s)
        self._running += bool(batch)
        self._running_tokens += draw.tokens
        if batch and batch[0].lane == Lane.BULK:
            token_s = (now - self._bulk_drawn) / draw.tokens
            self._bulk_token_s = _RATE_MEMORY * self._bulk_token_s + (1 - _RATE_MEMORY) * token_s
            self._bulk_drawn = now
        return draw

    def ended(self, draw: Draw, seconds: float, *, answered: bool) -> None:
        """Count the end of a run that took so long. A run that failed is not measured: it may have ended at once."""
        rate = self._running * draw.tokens / seconds
        # A run that emptied the queue may have been short, so it can raise the rate but not lower it.
        if answered and (draw.leaves_some or rate > self.tokens_per_s):
            self.tokens_per_s = _RATE_MEMORY * self.tokens_per_s + (1 - _RATE_MEMORY) * rate
        self._running -= 1
        self._running_tokens -= draw.tokens
