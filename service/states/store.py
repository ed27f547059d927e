"""A store on its own thread, for callers on any thread or event loop.

Calls wait in a bounded queue. The thread joins waiting calls to a group, at most the engine's `group_size`, and the calls of a group share
one sync. If one call fails, the other calls of its group are still carried out.
"""

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from service.errors import Overloaded, StoreFailed, StoreFull
from service.states.backend import Trouble
from service.states.engine import StateEngine
from service.states.record import Status, Usage

T = TypeVar("T")

_WAITING = 4096  # limit on the calls in the queue
_RETRY_S = 1.0
_COUNT_S = 10.0  # seconds between two counts of all states


class Observer(Protocol):
    """Receives the events of a store, for metrics. All methods except `opened` are called on the store's thread."""

    def opened(self, waiting: Callable[[], int], trouble: Callable[[], Trouble | None]) -> None:
        """Called when the store is opened. `waiting` returns the number of calls in the queue, `trouble` what is wrong with the store."""
        ...

    def finished(self, elapsed_s: float) -> None:
        """Called when a group of calls is durable or has failed, `elapsed_s` seconds after its beginning."""
        ...

    def counted(self, ended: Mapping[Status, int], damaged_blobs: int) -> None:
        """Called with `ended` and `damaged_blobs` of the engine, which count from the opening of the store; see `StateEngine`."""
        ...

    def kept(self, usage: Usage) -> None: ...


class Store:
    """An engine with its thread and its queue. Create it in the process that uses it, because a forked process does not have the thread."""

    def __init__(self, engine: StateEngine, observer: Observer | None = None) -> None:
        self._engine = engine
        self._observer = observer
        self._counted_at = -math.inf
        self._calls: queue.Queue[tuple[Callable[[StateEngine], Any], Future[Any]] | None] = queue.Queue(_WAITING)
        self._closed = False
        self._failed: Trouble | None = None
        if observer is not None:
            observer.opened(self._calls.qsize, self.trouble)
        self._start()

    def _start(self) -> None:
        """Start the thread. Simulations of the tests have no thread."""
        self._thread = threading.Thread(target=self._work, name="states", daemon=True)
        self._thread.start()

    def trouble(self) -> Trouble | None:
        """Return what is wrong with the store now, or None. May be called on any thread."""
        return self._engine.trouble() or self._failed

    def submit(self, call: Callable[[StateEngine], T]) -> Future[T]:
        """Queue a call of the engine. The returned future gets the call's result when its changes are durable. Raises Overloaded if the
        queue is full, or StoreFailed if the store is closed."""
        future: Future[T] = Future()
        if self._closed:
            raise StoreFailed("the store of states is closed: the service is stopping")
        try:
            self._calls.put_nowait((call, future))
        except queue.Full:
            message = f"the store of states has {_WAITING} calls waiting, its limit: send the request again later"
            raise Overloaded(message, retry_after_s=_RETRY_S) from None
        return future

    async def call(self, call: Callable[[StateEngine], T]) -> T:
        """Queue a call of the engine, and return its result, for a caller on the event loop. The call is carried out even if the caller is
        cancelled."""
        calling = asyncio.wrap_future(self.submit(call))
        calling.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio logs errors that nobody retrieves
        return await asyncio.shield(calling)

    def close(self) -> None:
        """Carry out the waiting calls, then close the engine."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join()

    def _work(self) -> None:
        for group in self._groups():
            self._carry_out(group)
        self._engine.close()

    def _carry_out(self, group: list[tuple[Callable[[StateEngine], Any], Future[Any]]]) -> None:
        """Carry out the calls of a group, then set the results of their futures. Simulations of the tests call this without a thread."""
        begun = time.perf_counter()
        results = self._together(group, self._engine.group)
        if any(isinstance(failure, StoreFull) for *_, failure in results):
            results = [self._on_a_full_disk(*each) for each in group]
        failures = [failure for *_, failure in results if isinstance(failure, StoreFailed)]
        self._failed = Trouble("failed", failures[0].message) if failures else None
        elapsed_s = time.perf_counter() - begun
        for future, result, failure in results:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
        if self._observer is not None:
            self._observe(self._observer, elapsed_s)

    def _together(
        self, group: list[tuple[Callable[[StateEngine], Any], Future[Any]]], within: Callable[[], AbstractContextManager[None]]
    ) -> list[tuple[Future[Any], Any, BaseException | None]]:
        """Carry out calls within one group of the engine. Return the future, the result and the error of each."""
        try:
            with within():
                return [self._one(call, future) for call, future in group]
        except BaseException as error:  # the commit failed, so no call of this group is durable
            return [(future, None, error) for _, future in group]

    def _on_a_full_disk(self, call: Callable[[StateEngine], Any], future: Future[Any]) -> tuple[Future[Any], Any, BaseException | None]:
        """Carry out a call alone: as it is, and then twice with the room that is set aside, because the first time may evict states."""
        result: tuple[Future[Any], Any, BaseException | None]
        for within in (self._engine.group, self._engine.spare, self._engine.spare):
            (result,) = self._together([(call, future)], within)
            if not isinstance(result[-1], StoreFull):
                break
        return result

    def _observe(self, observer: Observer, elapsed_s: float) -> None:
        observer.finished(elapsed_s)
        observer.counted(self._engine.ended, self._engine.damaged_blobs)
        if time.monotonic() - self._counted_at >= _COUNT_S:
            with contextlib.suppress(StoreFailed, *self._engine.failures):
                observer.kept(self._engine.totals())
            self._counted_at = time.monotonic()

    def _one(self, call: Callable[[StateEngine], Any], future: Future[Any]) -> tuple[Future[Any], Any, BaseException | None]:
        """Carry out one call. Return its future, its result and its error. Raises errors of the store itself, which end the group."""
        try:
            return future, call(self._engine), None
        except Exception as error:
            if isinstance(error, (StoreFailed, *self._engine.failures)) and not isinstance(error, StoreFull):
                raise
            return future, None, error

    def _groups(self) -> Iterator[list[tuple[Callable[[StateEngine], Any], Future[Any]]]]:
        while (first := self._calls.get()) is not None:
            group = [first]
            while len(group) < self._engine.group_size and not self._calls.empty():
                if (following := self._calls.get()) is None:
                    yield group
                    return
                group.append(following)
            yield group
