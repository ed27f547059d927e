"""Runs several calls at the same time, on threads that are kept for this. The calls must release the GIL, or they run in turn."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from service.runtime.priority import give_way

Call = Callable[[], None]


class SideBySide:
    """Makes several calls at once, the first on the caller's own thread. An object must be used by one thread only.

    It is not a `ThreadPoolExecutor`, because its futures wake a thread by lock and condition, which takes a fifth of a decode step.
    """

    def __init__(self, width: int) -> None:
        """`width` is the largest number of concurrent calls."""
        self._calls: list[SimpleQueue[Call | None]] = [SimpleQueue() for _ in range(width - 1)]
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, calls in enumerate(self._calls):
            threading.Thread(target=_make, args=(calls, self._ended), name=f"side-{number}", daemon=True).start()
            weakref.finalize(self, calls.put, None)

    def __call__(self, calls: Sequence[Call]) -> None:
        """Make the calls, and wait until all have ended. If calls failed, raises one of their errors."""
        first, *others = calls
        for queue, call in zip(self._calls, others, strict=False):
            queue.put(call)
        try:
            first()
        finally:
            errors = [error for _ in others if (error := self._ended.get()) is not None]
        if errors:
            raise errors[0]


def _make(calls: "SimpleQueue[Call | None]", ended: "SimpleQueue[BaseException | None]") -> None:
    give_way()
    while (call := calls.get()) is not None:
        failure: BaseException | None = None
        try:
            call()
        except BaseException as error:  # raised again on the caller's thread
            failure = error
        del call  # it may hold much memory, and the next call may be hours away
        ended.put(failure)
        del failure
