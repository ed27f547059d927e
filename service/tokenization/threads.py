"""Threads that tokenise, shared fairly by clients.

A text of a million characters takes seconds and cannot be interrupted. So long work uses at most one thread, and one thread is reserved for
short work. The order of the work prefers short work and clients that have used little (`service/runtime/fairness.py`).
"""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from service.runtime.fairness import FairOrder

Result = TypeVar("Result")

LONG_CHARACTERS = 120_000  # work with more characters counts as long; a caller splits several short texts so that each call is below this
_Work = tuple[float, int, Callable[[], Any], "Future[Any]"]


class Tokenizers:
    """`threads` threads for work of any length, and one more thread that is reserved for short work."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._order = FairOrder()
        self._waiting: list[list[_Work]] = [[], []]  # two heaps: short work and long work
        self._numbers = itertools.count()
        self._long_running = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"tokenizer-{n}", daemon=True) for n in range(max(threads, 1) + 1)]
        self._started = False

    async def run(self, work: Callable[[], Result], *, size: int, client: str = "") -> Result:
        """Run `work` on one of the threads and return its result. `size` is the number of characters that it tokenises."""
        future: Future[Result] = Future()
        with self._changed:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            entry = self._order.tag(client, size), next(self._numbers), work, future
            heapq.heappush(self._waiting[size > LONG_CHARACTERS], entry)
            self._changed.notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop the threads. Running work finishes; queued work is cancelled."""
        with self._changed:
            self._closed = True
            for _, _, _, future in itertools.chain(*self._waiting):
                future.cancel()
            self._changed.notify_all()

    def _next(self) -> int | None:
        """Return the index of the heap with the smallest tag, or None. Long work is next only if no other long work is running."""
        short, long = self._waiting
        if long and not self._long_running and (not short or long[0] < short[0]):
            return 1
        return 0 if short else None

    def _work(self) -> None:
        while True:
            with self._changed:
                while (which := self._next()) is None and not self._closed:
                    self._changed.wait()
                if self._closed or which is None:
                    return
                tag, _, work, future = heapq.heappop(self._waiting[which])
                self._order.served(tag)
                self._long_running += which
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del work, future
            with self._changed:
                self._long_running -= which
                if which:
                    self._changed.notify()
