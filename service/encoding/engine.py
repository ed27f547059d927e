"""The engine of one encoder: a queue, and the threads that compute the queued inputs. It depends on neither HTTP nor Ray.

Requests are handled on the event loop. `concurrent_runs` threads call the runtime. Each takes its own next batch, so that no core
waits for the event loop between two batches. One lock, held for microseconds, guards the queue and the counters that both sides use.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.encoding import sparse
from service.encoding.batching import QueuedInput
from service.encoding.cache import VectorCache, keys_of
from service.encoding.gpu.session import open_session
from service.encoding.model import Model
from service.encoding.pending import PendingRequest
from service.encoding.queue import EncoderLimits, EncoderQueue
from service.encoding.request import NO_DEADLINE, EncodeTask, Row, RowOrError
from service.encoding.selftest import SelfTest, check_golden, measure_rate
from service.errors import DeadlineExceeded, NotReady, RuntimeFailed, ServiceError
from service.runtime.lanes import Lane
from service.runtime.offered import Offered
from service.runtime.onnx import CUDA, Array, Session, device_lost
from service.runtime.priority import give_way
from service.settings import Settings
from service.telemetry.logs import traces
from service.telemetry.metrics import ModelMetrics
from service.tokenization.texts import Encoded

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracer

log = logging.getLogger("attnserve")


class EncoderEngine:
    """An engine that computes rows of a graph's outputs. A batch may contain inputs of several requests.

    `start` and `run` must be called on the same event loop.
    """

    def __init__(
        self,
        session: Session,
        *,
        fingerprint: str,
        limits: EncoderLimits,
        metrics: ModelMetrics,
        cache: VectorCache,
        tracer: "Tracer | None" = None,
        ignored_ids: Collection[int] = (),
    ) -> None:
        """`ignored_ids`: token ids that get no weight in a sparse vector."""
        self.limits = limits
        self._ignored_ids = frozenset(ignored_ids)
        self._session = session
        self._fingerprint = fingerprint
        self._metrics = metrics
        self._cache = cache
        self._tracer = tracer
        self._changed = threading.Condition()  # guards the queue and `_closed`, and wakes the threads
        self.offered = Offered(metrics.offered.inc)
        self._queue = EncoderQueue(limits, self.offered)
        self._closed = False
        self._waking = False  # whether `_wake` is scheduled
        self._ended = False  # whether a thread has ended
        self._device_lost = False
        self._threads: list[threading.Thread] = []
        self._in_flight: dict[
            tuple[bytes, ...], QueuedInput
        ] = {}  # cache keys -> the input that is queued or running; used on the event loop only
        self._last_run_failed = False
        self._began: dict[int, float] = {}  # thread id -> time at which its current runtime call began
        metrics.queue_size.set_function(lambda: len(self._queue))
        metrics.queue_tokens.set_function(lambda: self._queue.tokens)
        metrics.rate.set_function(lambda: self.tokens_per_s)
        metrics.cache_bytes.set_function(lambda: cache.size)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the threads. Call it on the event loop that calls `run`."""
        self._loop = asyncio.get_running_loop()
        for number in range(self.limits.concurrent_runs):
            thread = threading.Thread(target=self._run_thread, name=f"runtime-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._metrics.ready.set(1)

    async def stop(self) -> None:
        """Finish the running batches, fail queued requests with NotReady, and end the threads."""
        self._close()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._metrics.ready.set(0)

    @property
    def healthy(self) -> bool:
        """Return whether the engine was started, every thread is alive, and the last runtime call succeeded."""
        return bool(self._threads) and self.alive and not self._last_run_failed

    @property
    def alive(self) -> bool:
        """Return whether no thread has died. True before `start`."""
        return not self._ended

    @property
    def stuck_s(self) -> float:
        """Return the seconds since the oldest current runtime call began; 0 if no call runs."""
        began = list(self._began.values())
        return time.monotonic() - min(began) if began else 0.0

    @property
    def queued_tokens(self) -> int:
        """Return the number of tokens that are queued or being computed."""
        return self._queue.tokens + self._queue.running_tokens

    @property
    def tokens_per_s(self) -> float:
        return self._queue.tokens_per_s

    def check(self, lane: Lane, client: str = "", content: int = 0) -> None:
        """Raise QueueTooLong if the queue of this lane is too long for another request of this client. Only pools use `content`."""
        with self._changed:
            self._queue.check(lane, time.monotonic(), client)

    def keeps_places(self, lane: Lane) -> bool:
        """Return whether this lane of the queue keeps places for clients that were refused."""
        with self._changed:
            return self._queue.keeps_places(lane, time.monotonic())

    def withdraw(self, lane: Lane, client: str, told_s: float) -> None:
        """Give up the place that a refusal has promised to this client, with `told_s` as its `retry_after_s`."""
        with self._changed:
            self._queue.withdraw(lane, client, told_s)

    def refused(self, tokens: float) -> None:
        """Add tokens that a gateway refused to the offered load."""
        self.offered.add(tokens / self.tokens_per_s)

    async def run(self, task: EncodeTask) -> list[RowOrError]:
        """Compute the task. Returns a list with the row or the error of each input, in order.

        Raises Overloaded or NeverFits before anything is queued, and DeadlineExceeded at the deadline. If the caller is cancelled, its
        inputs are dropped from the queue.
        """
        if self._loop is None:
            raise NotReady("the model is still being started")
        if not task.inputs:
            return []
        done: asyncio.Future[list[RowOrError]] = self._loop.create_future()
        request = PendingRequest(task, time.monotonic(), done)
        self._submit(request)
        try:
            async with asyncio.timeout(None if task.deadline == NO_DEADLINE else max(task.deadline - time.monotonic(), 0)):
                return await done
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its answer was there") from None
        finally:
            request.cancelled = True

    async def probe(self, inputs: Sequence[Encoded], output: str, deadline: float) -> None:
        """Compute these inputs without the cache. Raises a ServiceError if that fails."""
        for row in await self.run(EncodeTask(inputs=inputs, outputs=(output,), deadline=deadline, use_cache=False)):
            if isinstance(row, ServiceError):
                raise row

    # On the event loop -----------------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            left: list[QueuedInput] = []
            while len(self._queue):
                batch, dropped = self._queue.take(-math.inf)
                left += batch + dropped
            self._changed.notify_all()
        self._deliver(left, [_stopping() for _ in left])

    def _submit(self, request: PendingRequest) -> None:
        task, now = request.task, request.arrived
        outputs, lane = task.outputs, task.lane
        new: list[QueuedInput] = []
        joined: list[tuple[QueuedInput, int]] = []
        cached: list[tuple[int, Row]] = []
        own: dict[tuple[bytes, ...], QueuedInput] = {}
        for index, encoded in enumerate(task.inputs):
            keys = keys_of(task.tenant, self._fingerprint, outputs, encoded.ids, encoded.type_ids, encoded.unattended)
            if task.use_cache and (row := self._cache.all(keys)) is not None:
                cached.append((index, row))
            elif (item := own.get(keys) or self._in_flight.get(keys)) is not None and (item.taken or item.lane <= lane):
                joined.append((item, index))
            else:
                item = own[keys] = QueuedInput(
                    encoded.ids,
                    encoded.type_ids,
                    outputs,
                    lane,
                    now,
                    keys,
                    [(request, index)],
                    task.client,
                    unattended=encoded.unattended,
                )
                new.append(item)
        self._admit(new, lane, task.deadline)  # called before any change, because it may raise an error
        for item, index in joined:
            item.waiters.append((request, index))
        self._in_flight.update(own)
        for index, row in cached:
            request.set(index, row)
        if cached:
            self._metrics.cache_hits.inc(len(cached))
        if joined:
            self._metrics.joined.inc(len(joined))

    def _admit(self, items: Sequence[QueuedInput], lane: Lane, deadline: float) -> None:
        with self._changed:
            if self._closed:
                raise _stopping()
            self._queue.enter(items, lane, time.monotonic(), deadline)
        if items and not self._waking:
            assert self._loop is not None
            self._waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Wake a runtime thread, once for all requests that were read in one iteration of the event loop."""
        self._waking = False
        with self._changed:
            self._changed.notify()

    def _deliver(self, items: Sequence[QueuedInput], rows: Sequence[RowOrError], started: float = 0.0, elapsed: float = 0.0) -> None:
        """Pass each input's row to the requests that wait for the input, and to the cache. `started` and `elapsed` are the
        beginning and the duration of the runtime call.
        """
        for item, row in zip(items, rows, strict=True):
            if self._in_flight.get(item.keys) is item:
                del self._in_flight[item.keys]
            if not isinstance(row, ServiceError):
                for key, output, array in zip(item.keys, item.outputs, row, strict=True):
                    if output != contract.TOKEN_EMBEDDINGS:
                        self._cache.add(key, array)
            for request, index in item.waiters:
                if not request.cancelled:
                    request.task.spent.queue_s += max(started - request.arrived, 0.0)
                    request.task.spent.inference_s += elapsed
                    request.set(index, row)

    def _complete(self, batch: Sequence[QueuedInput], rows: Sequence[RowOrError], started: float, elapsed: float) -> None:
        """Deliver the rows of a runtime call, then update the metrics."""
        self._deliver(batch, rows, started, elapsed)
        tokens, padded = sum(len(item.ids) for item in batch), max(len(item.ids) for item in batch) * len(batch)
        metrics = self._metrics
        metrics.queueing.observe(started - batch[0].arrived)
        metrics.inference.observe(elapsed)
        metrics.batch_size.observe(len(batch))
        metrics.batch_tokens.observe(padded)
        metrics.tokens.inc(tokens)
        metrics.padding.inc(padded - tokens)
        if self._tracer is not None:
            self._tracer.batch(batch, rows, started, elapsed)

    def _drop(self, items: Sequence[QueuedInput]) -> None:
        """Fail the requests that wait for dropped inputs. If another request joined an input during its drop, queue the input again."""
        now = time.monotonic()
        for item in items:
            waiting = [(each, index) for each, index in item.waiters if not each.cancelled and now < each.task.deadline]
            overdue = [waiter for waiter in waiting if waiter[0].overdue(now, self._queue.max_unstarted_of(item.lane))]
            alive = [waiter for waiter in waiting if waiter not in overdue]
            item.waiters = [waiter for waiter in item.waiters if waiter not in alive]
            self._metrics.dropped.inc(len(item.waiters))
            if self._tracer is not None:
                self._tracer.dropped(item)
            item.waiters = [waiter for waiter in item.waiters if waiter not in overdue]
            self._deliver([item], [DeadlineExceeded("the request's deadline passed while it was queued")])
            item.waiters = overdue
            if overdue:
                with self._changed:
                    error = self._queue.too_late(item, now)
                self._deliver([item], [error])
            if alive:
                again = dataclasses.replace(item, waiters=alive, taken=False)
                with self._changed:
                    closed = self._closed  # if closed, `_close` has already emptied the queue
                    if not closed:
                        self._queue.put(again)
                        self._changed.notify()
                if closed:
                    self._deliver([again], [_stopping()])
                else:
                    self._in_flight.setdefault(item.keys, again)

    # On a runtime thread ---------------------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            give_way()
            self._work()
        finally:
            self._ended = True

    def _work(self) -> None:
        assert self._loop is not None
        while True:
            with self._changed:
                while not len(self._queue) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                draw = self._queue.draw(time.monotonic())
                if draw.leaves_some:
                    self._changed.notify()  # another thread takes the rest
            if draw.dropped:
                self._post(self._drop, draw.dropped)
            if batch := draw.batch:
                started = self._began[threading.get_ident()] = time.monotonic()
                rows = self._run(batch, draw.alone)
                del self._began[threading.get_ident()]
                elapsed = max(time.monotonic() - started, 1e-6)
                with self._changed:
                    self._queue.ended(draw, elapsed, answered=any(not isinstance(row, ServiceError) for row in rows))
                self._post(self._complete, batch, rows, started, elapsed)
            if self._device_lost:  # the thread ends, so `alive` becomes false and the process is replaced
                self._post(self._close)
                return

    def _run(self, batch: list[QueuedInput], alone: bool) -> Sequence[RowOrError]:
        """Make one runtime call. If it raises, all inputs of the batch fail. If one row is invalid, only the input of that row fails."""
        outputs = sorted({name for item in batch for name in item.outputs})
        typed = [item.type_ids for item in batch if item.type_ids is not None]
        try:
            types = typed if len(typed) == len(batch) else None
            arrays = self._session.run(outputs, [item.ids for item in batch], types, [item.unattended for item in batch], alone=alone)
            lengths = [len(item.ids) for item in batch]
            fit = {name: _may_be_sent(name, array, lengths) for name, array in arrays.items()}
            rows = [self._row(item, arrays, fit, at) for at, item in enumerate(batch)]
        except BaseException as error:  # catches SystemExit too: if the thread ended, queued inputs would wait forever
            self._last_run_failed = True
            self._device_lost |= device_lost(error)
            # A copy of the list, because the event loop may add waiters.
            traced = traces(each.task.traceparent for item in batch for each, _ in list(item.waiters))
            log.exception("run failed", extra={"inputs": len(batch), "tokens": sum(len(item.ids) for item in batch), **traced})
            # Each input gets its own exception object, because raising an exception changes its traceback.
            return [RuntimeFailed(f"the runtime failed on a batch of {len(batch)}; the log says why") for _ in batch]
        self._last_run_failed = False
        return rows

    def _row(self, item: QueuedInput, arrays: Mapping[str, Array], fit: Mapping[str, NDArray[np.bool_]], at: int) -> RowOrError:
        """Return the row of the batch's input at `at`, without padding, or an error if an output may not be sent."""
        if not all(fit[name][at] for name in item.outputs):
            self._metrics.bad_outputs.inc()
            return RuntimeFailed("the model's output for this input is not finite or has no length; it was withheld")
        return tuple([self._sent(name, arrays[name][at], item.ids) for name in item.outputs])

    def _sent(self, output: str, array: Array, ids: Sequence[int]) -> Array:
        """Return one output of an input without padding. It is a copy, because a view would keep the memory of its whole batch."""
        if output == contract.SPARSE:
            return sparse.of_weights(array)
        if output == contract.TOKEN_WEIGHTS:
            return sparse.of_tokens(ids, array[: len(ids)], self._ignored_ids)
        if output == contract.MULTIVECTOR:
            return array[: len(ids)].astype(np.float16)
        return array[: len(ids)].copy() if array.ndim == 2 else array.copy()

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed; then no caller waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


def open_encoder(
    model: Model,
    settings: Settings,
    *,
    threads: int,
    cache: VectorCache,
    tracer: "Tracer | None",
    open_session: Callable[..., Session] = open_session,
) -> tuple[EncoderEngine, str, SelfTest]:
    """Open the engine of an encoder, test it and measure its speed. Returns the engine, its provider's name and the test's result."""
    manifest = model.manifest
    session = open_session(model.bundle, manifest, threads=threads, provider=settings.provider, gpu_memory_gib=settings.gpu_memory_gib)
    selftest = check_golden(model.bundle, manifest, model.texts, session)
    short_tokens = 0 if manifest.short_graph is None else manifest.short_graph.max_tokens
    rate = measure_rate(session, model.output, short_tokens or manifest.limits.max_tokens)
    on_gpu = session.provider == CUDA
    concurrent_runs = 2 if on_gpu else threads  # 2 on a GPU: one run is prepared while another one computes
    limits = EncoderLimits(
        max_queue_tokens=settings.max_queue_tokens,
        max_batch_tokens=max(settings.max_batch_tokens or (16_384 if on_gpu else 512), manifest.limits.max_tokens),
        run_cost_tokens=rate.run_cost_tokens,
        spread_tokens=rate.spread_tokens,
        short_tokens=short_tokens,
        tokens_per_s=rate.tokens_per_s * concurrent_runs,
        bulk_delay_s=settings.bulk_delay_s,
        concurrent_runs=concurrent_runs,
        cores=1 if on_gpu else concurrent_runs,
        max_wait_s=settings.max_wait_s,
        max_bulk_wait_s=settings.max_bulk_wait_s,
    )
    fingerprint, ignored = manifest.fingerprint, () if manifest.sparse is None else manifest.sparse.ignored_ids
    engine = EncoderEngine(
        session, fingerprint=fingerprint, limits=limits, metrics=model.metrics, cache=cache, tracer=tracer, ignored_ids=ignored
    )
    return engine, session.provider, selftest


def _stopping() -> NotReady:
    return NotReady("the service is shutting down: send the request to another replica")


def _may_be_sent(output: str, array: Array, lengths: Sequence[int]) -> NDArray[np.bool_]:
    """Return, for each row, whether it may be sent, (B,) bool. A valid row has no NaN or Inf, has no vector of length 0,
    and has length 1 if the output is normalised.
    """
    flat = array.reshape(len(array), -1)
    squares: Array = np.einsum("bd,bd->b", flat, flat)  # if a number is NaN or Inf, so is this sum
    if output == contract.EMBEDDING:
        fit: NDArray[np.bool_] = np.abs(squares - 1) < 1e-2
    else:
        fit = np.isfinite(squares) & ((squares > 0) | (output != contract.POOLED))
    if output in (contract.TOKEN_EMBEDDINGS, contract.MULTIVECTOR):
        padding = np.arange(array.shape[1]) >= np.asarray(lengths)[:, None]
        fit &= (array.any(axis=2) | padding).all(axis=1)
    return fit
