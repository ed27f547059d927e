"""Threads that tokenise, shared fairly by clients.

A text of a million characters takes seconds and cannot be interrupted. So long work uses at most one thread, and one thread is reserved for
short work. The order of the work prefers short work and clients that have used little (`service/runtime/fairness.py`). Work whose caller
has left is not begun, and its texts are released at once.
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
INLINE_CHARACTERS = 4_000  # work with fewer takes less time than a switch to another thread
_Turn = tuple[float, int]  # the tag and number of some work; those with the smallest tag are next


class Tokenizers:
    """`threads` threads for work of any length, and one more thread that is reserved for short work."""

    def __init__(self, threads: int) -> None:
        self._changed = threading.Condition()
        self._order = FairOrder()
        self._turns: list[list[_Turn]] = [[], []]  # two heaps: of short work and long work
        self._waiting: dict[int, tuple[Callable[[], Any], Future[Any]]] = {}  # by number
        self._numbers = itertools.count()
        self._long_running = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"tokenizer-{n}", daemon=True) for n in range(max(threads, 1) + 1)]
        self._started = False

    async def run(self, work: Callable[[], Result], *, size: int, client: str) -> Result:
        """Run `work` and return its result: at once if it is small, otherwise on one of the threads. `size` is the number of characters
        that it tokenises. If the caller is cancelled, work that has begun goes on, and its result is dropped.
        """
        if size <= INLINE_CHARACTERS:
            return work()
        future: Future[Result] = Future()
        with self._changed:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            number = next(self._numbers)
            self._waiting[number] = work, future
            heapq.heappush(self._turns[size > LONG_CHARACTERS], (self._order.tag(client, size), number))
            self._changed.notify()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.pop(number, None)
            raise

    def close(self) -> None:
        """Stop the threads. Running work finishes; queued work is cancelled."""
        with self._changed:
            self._closed = True
            for _, future in self._waiting.values():
                future.cancel()
            self._changed.notify_all()

    def _next(self) -> int | None:
        """Return the index of the heap with the smallest tag, or None. Long work is next only if no other long work is running."""
        for turns in self._turns:
            while turns and turns[0][1] not in self._waiting:
                heapq.heappop(turns)
        short, long = self._turns
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
                tag, number = heapq.heappop(self._turns[which])
                work, future = self._waiting.pop(number)
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
