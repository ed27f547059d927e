"""The queue in front of one model and the threads that empty it. No HTTP and no Ray here.

Requests live on the event loop; the runtime is called from `concurrent_runs` threads, each of which draws its own next batch, so that no
core waits for the loop between two batches. What both sides touch (the queue and the counters beside it) is behind one lock, held for
microseconds.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.batching import Item, Lane, Queue, Spent, Work
from service.cache import VectorCache, key_of
from service.errors import DeadlineExceeded, NeverFits, NotReady, Overloaded, RuntimeFailed, ServiceError
from service.metrics import ModelMetrics
from service.runtime import Array, Session
from service.tokenization import Encoded

log = logging.getLogger("attnserve")

NO_DEADLINE = math.inf
_RATE_MEMORY = 0.9  # weight of the past in the moving average of tokens a second


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Bounds of one engine, all in tokens or seconds."""

    max_queue_tokens: int = 524_288
    max_batch_tokens: int = 512
    run_cost_tokens: float = 16.0
    tokens_per_s: float = 5_000.0
    bulk_delay_s: float = 2.0
    concurrent_runs: int = 1


class EncoderEngine:
    """Turns encoded inputs into rows of a graph output, sharing runtime calls between requests.

    `start` and `run` belong to one event loop. A row is float32: (D,) of a vector, (N, D) of token vectors, (L,) of logits.
    """

    def __init__(self, session: Session, *, fingerprint: str, limits: EngineLimits, metrics: ModelMetrics, cache: VectorCache) -> None:
        self.limits = limits
        self._session = session
        self._fingerprint = fingerprint
        self._metrics = metrics
        self._cache = cache
        self._queue = Queue(limits.max_batch_tokens, limits.run_cost_tokens, limits.bulk_delay_s)
        self._changed = threading.Condition()  # guards everything below it, and the queue
        self._running_tokens = 0
        self._running = 0
        self._tokens_per_s = limits.tokens_per_s
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._in_flight: dict[bytes, Item] = {}  # by key; event loop only
        self._last_run_failed = False
        metrics.queue_size.set_function(lambda: len(self._queue))
        metrics.queue_tokens.set_function(lambda: self._queue.tokens)
        metrics.rate.set_function(lambda: self._tokens_per_s)
        metrics.cache_bytes.set_function(lambda: cache.size_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to work. To be called on the event loop that will call `run`."""
        self._loop = asyncio.get_running_loop()
        for number in range(self.limits.concurrent_runs):
            thread = threading.Thread(target=self._work, name=f"runtime-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._metrics.ready.set(1)

    async def stop(self) -> None:
        """Finish the batches that run, fail what is queued with NotReady, end the threads."""
        with self._changed:
            self._closed = True
            left: list[Item] = []
            while len(self._queue):
                batch, dropped = self._queue.take(-math.inf)
                left += batch + dropped
            self._changed.notify_all()
        self._deliver(left, [_stopping() for _ in left])
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._metrics.ready.set(0)

    @property
    def healthy(self) -> bool:
        """Warm, every thread alive, and the last runtime call succeeded."""
        return bool(self._threads) and self.alive and not self._last_run_failed

    @property
    def alive(self) -> bool:
        """No thread has died; true before `start`."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def queued_tokens(self) -> int:
        return self._queue.tokens + self._running_tokens

    @property
    def tokens_per_s(self) -> float:
        return self._tokens_per_s

    async def run(
        self,
        inputs: Sequence[Encoded],
        *,
        output: str,
        lane: Lane = Lane.INTERACTIVE,
        deadline: float = NO_DEADLINE,
        on_result: Callable[[int, Array | ServiceError], None] | None = None,
        spent: Spent | None = None,
        use_cache: bool = True,
    ) -> list[Array | ServiceError]:
        """The row of each input, in order, or the error that befell it. `deadline` is in `time.monotonic()` seconds; `spent` is added to.

        Raises Overloaded or NeverFits before anything is queued, DeadlineExceeded when time runs out; cancelling the caller drops its
        inputs from the queue.
        """
        if self._loop is None:
            raise NotReady("the model is still being started")
        work = Work(len(inputs), deadline, time.monotonic(), spent)
        if on_result:
            work.on_result = lambda index: on_result(index, work.results[index])
        done = self._loop.create_future()
        work.on_done = lambda: _settle(done)
        self._submit(work, inputs, output, lane, use_cache)
        timer = None
        if deadline != NO_DEADLINE:
            timer = self._loop.call_later(max(deadline - time.monotonic(), 0), _expire, done)
        try:
            if work.remaining:
                await done
            return work.results
        finally:
            work.cancelled = True
            if timer:
                timer.cancel()

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def _submit(self, work: Work, inputs: Sequence[Encoded], output: str, lane: Lane, use_cache: bool) -> None:
        now = work.arrived
        fresh: list[Item] = []
        joined: list[tuple[Item, int]] = []
        cached: list[tuple[int, Array]] = []
        own: dict[bytes, Item] = {}
        for index, encoded in enumerate(inputs):
            key = key_of(self._fingerprint, output, encoded.ids, encoded.type_ids)
            if use_cache and (row := self._cache.get(key)) is not None:
                cached.append((index, row))
            elif (item := own.get(key) or self._in_flight.get(key)) is not None and (item.taken or item.lane <= lane):
                joined.append((item, index))
            else:
                item = own[key] = Item(encoded.ids, encoded.type_ids, output, lane, now, key, [(work, index)])
                fresh.append(item)
        self._admit(fresh, lane, work.deadline - now)  # raises before anything was changed
        for item, index in joined:
            item.waiters.append((work, index))
        self._in_flight.update(own)
        for index, row in cached:
            work.set(index, row)
        if cached:
            self._metrics.cache_hits.inc(len(cached))
        if joined:
            self._metrics.joined.inc(len(joined))

    def _admit(self, items: Sequence[Item], lane: Lane, time_left_s: float) -> None:
        tokens = sum(len(item.ids) for item in items)
        limit = self.limits.max_queue_tokens
        if tokens > limit:
            raise NeverFits(f"the request has {tokens} tokens and the queue holds {limit}: send it in parts")
        with self._changed:
            if self._closed:
                raise _stopping()
            if items and time_left_s <= 0:
                raise DeadlineExceeded("the request's deadline passed before it was queued")
            wait_s = (self._queue.tokens_before(lane) + self._running_tokens) / self._tokens_per_s
            if (excess := self._queue.tokens + tokens - limit) > 0:
                raise Overloaded(
                    f"Model is overloaded: {self._queue.tokens} of {limit} tokens are queued and the request has {tokens}",
                    retry_after_s=excess / self._tokens_per_s,
                )
            if items and wait_s > time_left_s:
                raise Overloaded(
                    f"Model is overloaded: the queue needs about {wait_s:.2f} s and the request gives it {time_left_s:.2f} s",
                    retry_after_s=wait_s - time_left_s,
                )
            for item in items:
                self._queue.put(item)
            self._changed.notify(len(items))

    def _deliver(self, items: Sequence[Item], rows: Sequence[Array | ServiceError], started: float = 0.0, elapsed: float = 0.0) -> None:
        """Hand each item's row to everyone who waits for it, and to the cache. `started` and `elapsed` are of the run that gave it."""
        for item, row in zip(items, rows, strict=True):
            if self._in_flight.get(item.key) is item:
                del self._in_flight[item.key]
            if not isinstance(row, ServiceError) and item.output != contract.TOKEN_EMBEDDINGS:
                self._cache.put(item.key, row)
            for work, index in item.waiters:
                if not work.cancelled:
                    work.spent.queue_s += max(started - work.arrived, 0.0)
                    work.spent.inference_s += elapsed
                    work.set(index, row)

    def _complete(self, batch: Sequence[Item], rows: Sequence[Array | ServiceError], started: float, elapsed: float) -> None:
        """A run has ended: first whoever waits for it, then the books."""
        self._deliver(batch, rows, started, elapsed)
        tokens, padded = sum(len(item.ids) for item in batch), max(len(item.ids) for item in batch) * len(batch)
        metrics = self._metrics
        metrics.queueing.observe(started - batch[0].arrived)
        metrics.inference.observe(elapsed)
        metrics.batch_size.observe(len(batch))
        metrics.batch_tokens.observe(padded)
        metrics.tokens.inc(tokens)
        metrics.padding.inc(padded - tokens)

    def _drop(self, items: Sequence[Item]) -> None:
        """Tell those who waited in vain; whoever joined an item in the moment it was dropped goes back into the queue."""
        now = time.monotonic()
        for item in items:
            alive = [(work, index) for work, index in item.waiters if not work.cancelled and now < work.deadline]
            item.waiters = [waiter for waiter in item.waiters if waiter not in alive]
            self._metrics.dropped.inc(len(item.waiters))
            self._deliver([item], [DeadlineExceeded("the request's deadline passed while it was queued")])
            if alive:
                again = dataclasses.replace(item, waiters=alive, taken=False)
                with self._changed:
                    closed = self._closed  # by stop(), which has emptied the queue for the last time
                    if not closed:
                        self._queue.put(again)
                        self._changed.notify()
                if closed:
                    self._deliver([again], [_stopping()])
                else:
                    self._in_flight.setdefault(item.key, again)

    # On a runtime thread ---------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        assert self._loop is not None
        while True:
            with self._changed:
                while not len(self._queue) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                batch, dropped = self._queue.take(time.monotonic())
                tokens = sum(len(item.ids) for item in batch)
                alone = not self._running and not len(self._queue)
                self._running_tokens += tokens
                self._running += bool(batch)
            if dropped:
                self._post(self._drop, dropped)
            if batch:
                started = time.monotonic()
                rows = self._run(batch, alone)
                elapsed = max(time.monotonic() - started, 1e-6)
                answered = any(not isinstance(row, ServiceError) for row in rows)
                with self._changed:
                    if answered:  # a run that fails at once says nothing about how fast the others are
                        rate = self._running * tokens / elapsed
                        self._tokens_per_s = _RATE_MEMORY * self._tokens_per_s + (1 - _RATE_MEMORY) * rate
                    self._running -= 1
                    self._running_tokens -= tokens
                self._post(self._complete, batch, rows, started, elapsed)

    def _run(self, batch: list[Item], alone: bool) -> Sequence[Array | ServiceError]:
        """One runtime call. Whatever it raises, or gives that is no answer, belongs to the inputs of this batch alone."""
        outputs = sorted({item.output for item in batch})
        typed = [item.type_ids for item in batch if item.type_ids is not None]
        try:
            types = typed if len(typed) == len(batch) else None
            arrays = self._session.run(outputs, [item.ids for item in batch], types, alone=alone)
            fit = {name: _fit_to_leave(name, array) for name, array in arrays.items()}
            rows = [self._row(item, arrays[item.output][at], fit[item.output][at]) for at, item in enumerate(batch)]
        except BaseException:  # not even SystemExit ends this thread: what is queued would wait for it for good
            self._last_run_failed = True
            log.exception("run failed", extra={"inputs": len(batch), "tokens": sum(len(item.ids) for item in batch)})
            # An error for each: it is raised in as many requests, and an exception remembers where it was raised.
            return [RuntimeFailed(f"the runtime failed on a batch of {len(batch)}; the log says why") for _ in batch]
        self._last_run_failed = False
        return rows

    def _row(self, item: Item, row: Array, fit: bool) -> Array | ServiceError:
        """An item's own row, without its padding and without the memory of its batch."""
        if not fit:
            self._metrics.bad_outputs.inc()
            return RuntimeFailed("the model's output for this input is not finite or has no length; it was withheld")
        return row[: len(item.ids)].copy() if row.ndim == 2 else row.copy()

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def _stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")


def _settle(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)


def _expire(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_exception(DeadlineExceeded("the request's deadline passed before its answer was there"))


def _fit_to_leave(output: str, array: Array) -> NDArray[np.bool_]:
    """(B,) bool: rows without NaN or Inf that, as vectors, have a length (of 1, where they are normalised)."""
    flat = array.reshape(len(array), -1)
    squares: Array = np.einsum("bd,bd->b", flat, flat)  # NaN and Inf reach the sum
    if output == contract.EMBEDDING:
        fit: NDArray[np.bool_] = np.abs(squares - 1) < 1e-2
    else:
        fit = np.isfinite(squares) & ((squares > 0) | (output != contract.POOLED))
    return fit
