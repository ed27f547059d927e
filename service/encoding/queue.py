"""The queue of one encoder. Requests enter if admission accepts them, and their inputs leave in batches, which are short under overload.

This code starts no thread and reads no clock. Its owner holds a lock and passes the time to each method, so tests can simulate all cases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.encoding.batching import BULK_SHARE, BatchingQueue, QueuedInput
from service.errors import DeadlineExceeded, NeverFits, Overloaded, QueueTooLong
from service.overload.queue_bound import QueueBound
from service.runtime.lanes import Lane
from service.runtime.moving_average import averaged
from service.runtime.offered import Offered

# The size of a client's turn in the bulk lane, as a share of the tokens that are computed in `max_bulk_wait_s`. A request that fits
# into one turn is computed completely before the next request.
_BULK_TURN = 1 / 8
_SHORT_QUEUE = 0.25  # length of the short queue, as a share of `max_batch_tokens`; it keeps all threads busy, and fits in one short run
# Size of a batch under overload, as a share of `max_batch_tokens`. It is small, because an admitted request waits for the run in progress
# and for its own run.
_SHORT_RUN = 0.5
_UNSTARTED_QUEUES = 3.0  # under overload a request is dropped if it waits longer than this many short queues
_SMALL = 1 / 8  # a new client's small request waits for at most this many queued tokens of each other client; a share of `max_batch_tokens`


@dataclass(frozen=True, kw_only=True)
class EncoderLimits:
    """The limits of one engine, in tokens or seconds. Those without a setting are measured at start."""

    max_queue_tokens: int = 524_288
    max_batch_tokens: int = 512
    run_cost_tokens: float = 16.0
    spread_tokens: int = 0  # a run of fewer tokens is not spread over several cores
    tokens_per_s: float = 5_000.0
    short_tokens: int = 0  # see `BatchingQueue`
    bulk_delay_s: float = 2.0
    concurrent_runs: int = 1
    cores: int = 1  # among which all work is divided, if the runs do not share one device
    max_wait_s: float = 1.0
    max_bulk_wait_s: float = 30.0


@dataclass(frozen=True)
class Draw:
    """A batch of `tokens` tokens for one runtime call, and the inputs that were dropped when it was taken.

    `leaves_some` is True if inputs are left in the queue, and `full` if the batch moreover was not limited to a share of all work.
    `alone` is True if the call may use all cores: nothing is left, no other call runs, and the call is not too short.
    """

    batch: list[QueuedInput]
    dropped: list[QueuedInput]
    tokens: int
    alone: bool
    leaves_some: bool
    full: bool


class EncoderQueue(BatchingQueue):
    """A queue that admits requests by their tokens and their expected wait, and measures the rate at which inputs are computed. Used by one
    thread at a time.
    """

    def __init__(self, limits: EncoderLimits, offered: Offered | None = None) -> None:
        turn_tokens = _BULK_TURN * limits.max_bulk_wait_s * limits.tokens_per_s
        super().__init__(limits.max_batch_tokens, limits.run_cost_tokens, limits.bulk_delay_s, turn_tokens, limits.short_tokens)
        self._limits = limits
        self._offered = offered or Offered()
        self.tokens_per_s = limits.tokens_per_s  # moving average of the throughput of all concurrent runs together
        self.running = self.running_tokens = 0  # number of runs in progress; number of their tokens
        self._bounds = QueueBound(limits.max_wait_s), QueueBound(limits.max_bulk_wait_s)  # one bound for each lane
        self._request_tokens = [0.0, 0.0]  # moving average of the tokens of a request, for each lane
        # Moving average of the seconds per bulk token, and the time at which bulk tokens were taken last. This rate is not `tokens_per_s`,
        # because interactive work goes first.
        self._bulk_token_s = 0.0
        self._bulk_drawn = 0.0

    @property
    def short_queue_s(self) -> float:
        """Return the longest that a queue may be under overload, in seconds of work."""
        return _SHORT_QUEUE * self._limits.max_batch_tokens / self.tokens_per_s

    def check(self, lane: Lane, now: float, client: str) -> None:
        """Raise QueueTooLong if the queue of this lane is too long for another request of this client. It can be called before the request
        is tokenised.
        """
        tokens = self._request_tokens[lane]
        try:
            self._check_wait(lane, now, client, 1, arriving=tokens)
        except QueueTooLong:
            self._count_refusal(tokens)
            raise

    def enter(self, items: Sequence[QueuedInput], lane: Lane, now: float, deadline: float) -> None:
        """Queue all inputs of one request, or raise Overloaded, NeverFits or DeadlineExceeded."""
        if items:
            self._admit(sum(len(item.ids) for item in items), lane, now, items[0].client, deadline)
        for item in items:
            self.put(item)

    def draw(self, now: float) -> Draw:
        """Take the next batch from the queue, and return it. Call `ended` when its runtime call ends.

        A run beside others takes at most its share of all work. Otherwise, if clients wait for their answers before they send again, one
        run would take nearly all inputs again and again, and the other cores would have little to do.
        """
        self.max_batch_tokens, self.max_unstarted_s = self._limits.max_batch_tokens, math.inf
        if (bound := self._bounds[Lane.INTERACTIVE]).overloaded(now):
            self.max_batch_tokens = int(self._limits.max_batch_tokens * _SHORT_RUN)
            if now > bound.patient_until:
                self.max_unstarted_s = _UNSTARTED_QUEUES * self.short_queue_s
        share = math.ceil((self.tokens + self.running_tokens) / self._limits.cores) if self.running else self.max_batch_tokens
        batch, dropped = self.take(now, share)
        tokens, left = sum(len(item.ids) for item in batch), len(self) > 0
        alone = not self.running and not left and tokens >= self._limits.spread_tokens
        if batch:
            lane = batch[0].lane
            self.running += 1
            self.running_tokens += tokens
            self._bounds[lane].arrivals.started(tokens / self.tokens_per_s)
            if lane == Lane.BULK:
                self._bulk_token_s = averaged(self._bulk_token_s, (now - self._bulk_drawn) / tokens)
                self._bulk_drawn = now
        return Draw(batch, dropped, tokens, alone, left, left and share >= self.max_batch_tokens)

    def too_late(self, item: QueuedInput, now: float) -> Overloaded:
        """Return the error of a request that waited too long for the run of this input."""
        wait_s, work_s = self.tokens_before(item.lane) / self.tokens_per_s, len(item.ids) / self.tokens_per_s
        told_s = self._bounds[item.lane].promised_s(now, wait_s, item.client, work_s)
        return Overloaded("Model is overloaded: it took too long to begin", retry_after_s=told_s)

    def keeps_places(self, lane: Lane, now: float) -> bool:
        """Return whether this lane keeps places for clients that were refused."""
        return self._bounds[lane].promises.outstanding(now)

    def withdraw(self, lane: Lane, client: str, told_s: float) -> None:
        self._bounds[lane].promises.withdraw(client, told_s)

    def ended(self, draw: Draw, seconds: float, *, answered: bool) -> None:
        """Record that the run of this batch took `seconds`. The measured rate changes only if `answered` is True, because a failed run may
        end at once and seem fast.
        """
        rate = self.running * draw.tokens / seconds
        # Another run may not lower the rate, because its batch may have been too small for the full rate.
        if answered and (draw.full or rate > self.tokens_per_s):
            self.tokens_per_s = averaged(self.tokens_per_s, rate)
        self.running -= 1
        self.running_tokens -= draw.tokens

    def _admit(self, tokens: int, lane: Lane, now: float, client: str, deadline: float) -> None:
        if tokens > (limit := self._limits.max_queue_tokens):
            raise NeverFits(f"the request has {tokens} tokens and the queue holds {limit}: send it in parts")
        if (left_s := deadline - now) <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was queued")
        self._request_tokens[lane] = averaged(self._request_tokens[lane], tokens)
        try:
            self._check_wait(lane, now, client, tokens, arriving=tokens)
            self._count_arrival(lane, now, tokens)
            self._check_room(tokens, lane, now, client, left_s)
            self._bounds[lane].promises.keep(client, now)
        except Overloaded:
            self._count_refusal(tokens)
            raise
        self._offered.add(tokens / self.tokens_per_s)
        if lane == Lane.BULK and not self.lanes[lane].tokens:
            self._bulk_token_s, self._bulk_drawn = 1 / self.tokens_per_s, now

    def _check_wait(self, lane: Lane, now: float, client: str, tokens: int, *, arriving: float) -> None:
        """Raise QueueTooLong if a request of `tokens` tokens would wait too long. If it is refused and every other client would be refused
        too, count `arriving` tokens as arrived work, which shows an overload.
        """
        bound, queue = self._bounds[lane], self.lanes[lane]
        before = self.tokens_before(lane)
        queue_s = before / self.tokens_per_s
        if lane == Lane.BULK:
            queue_s = max(queue_s, queue.tokens * self._bulk_pace_s(now))
        # If the whole queue is short enough, the clients' shares of it do not matter.
        if queue_s <= bound.bound_s(now, self.short_queue_s) and not bound.promises:
            return
        if client:
            ahead = queue.ahead(client, tokens)
            queue_s = (before - queue.tokens + ahead) / self.tokens_per_s
            if lane == Lane.BULK:
                queue_s = max(queue_s, ahead * self._bulk_pace_s(now))
        for_all = self._too_long_for_all(lane, now)
        try:
            work_s, least_work_s = arriving / self.tokens_per_s, tokens / self.tokens_per_s
            bound.check(now, queue_s, self.short_queue_s, for_all=for_all, client=client, work_s=work_s, least_work_s=least_work_s)
        except QueueTooLong:
            if for_all:
                self._count_arrival(lane, now, arriving)
            raise

    def _too_long_for_all(self, lane: Lane, now: float) -> bool:
        """Return whether even a small request of a new client would wait too long. If not, only clients with long queues are refused."""
        waits_s = self.lanes[lane].capped(_SMALL * self._limits.max_batch_tokens) / self.tokens_per_s
        return waits_s > self._bounds[lane].bound_s(now, self.short_queue_s)

    def _check_room(self, tokens: int, lane: Lane, now: float, client: str, left_s: float) -> None:
        """Raise Overloaded if the queue has no room for `tokens` more tokens, or if they cannot be computed within `left_s` seconds."""
        limit, queued = self._limits.max_queue_tokens, self.tokens
        if (excess := queued + tokens - limit) > 0:
            raise Overloaded(
                f"Model is overloaded: {queued} of {limit} tokens are queued and the request has {tokens}",
                retry_after_s=self._bounds[lane].promised_s(now, excess / self.tokens_per_s, client, tokens / self.tokens_per_s),
            )
        if (wait_s := (self.tokens_before(lane) + self.running_tokens) / self.tokens_per_s) > left_s:
            raise Overloaded(
                f"Model is overloaded: the queue needs about {wait_s:.2f} s and the request gives it {left_s:.2f} s",
                retry_after_s=wait_s - left_s,
            )

    def _bulk_pace_s(self, now: float) -> float:
        """Return the measured seconds per queued token of bulk work. While interactive work is overloaded, return at least the seconds per
        token that bulk work's guaranteed share gives, because the measured value changes slowly.
        """
        least = BULK_SHARE / self.tokens_per_s if self._bounds[Lane.INTERACTIVE].overloaded(now) else 0.0
        return max(self._bulk_token_s, least)

    def _count_arrival(self, lane: Lane, now: float, tokens: float) -> None:
        if lane == Lane.INTERACTIVE:  # bulk work is not counted, because its long queue may fill faster than it empties
            self._bounds[lane].arrivals.arrived(now, tokens / self.tokens_per_s)

    def _count_refusal(self, tokens: float) -> None:
        if self._offered.counts_refusals:
            self._offered.add(tokens / self.tokens_per_s)
