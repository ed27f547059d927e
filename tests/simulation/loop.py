"""An event loop with virtual time and a seeded scheduler: the same seed gives the same run, event by event.

Nothing waits: if no callback is ready, the clock jumps to the next timer. Ready callbacks run in random order, since real ones come from
sockets and threads. Only the callbacks that the threads of one process have posted keep their order, as in asyncio. There is one thread,
so no locks are contended.
"""

import asyncio
import contextlib
import gc
import hashlib
import heapq
import random
from asyncio.events import Handle
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")  # owner of this context's tasks and timers
_START = 1_000.0  # seconds that every clock shows at the start
_EPOCH = 1_700_000_000.0  # seconds that time.time() shows more than the other clocks
_EXECUTOR_S = 0.01  # mean duration of a call in another thread


class Deadlock(AssertionError):
    """Tasks wait, but no callback is ready and no timer is set."""


class _Posted(Handle):
    """A callback that a thread has posted. It does not overtake earlier ones of the same process."""

    __slots__ = ("process",)

    def __init__(self, callback: Callable[..., object], arguments: Any, loop: "SimulatedLoop", context: Context | None) -> None:
        super().__init__(callback, arguments, loop, context)
        self.process = loop.process


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop that this module describes. All randomness of a simulation comes from `random`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.now = _START
        self.process = ""  # name of the process whose thread is running
        self.events: list[tuple[float, str]] = []
        self.broken: list[str] = []  # errors that no caller received
        self._stopped: dict[str, list[Handle]] = {}  # stopped process -> the callbacks to run when it continues
        self.set_exception_handler(lambda loop, context: self.broken.append(_described(context)))

    def time(self) -> float:
        return self.now

    @property
    def epoch(self) -> float:
        """The value of time.time()."""
        return _EPOCH + self.now

    def log(self, event: str) -> None:
        self.events.append((round(self.now - _START, 6), event))

    @property
    def digest(self) -> str:
        """A hash of all events so far and of the random generator's state: equal for equal runs."""
        return hashlib.sha256(repr((self.events, self.random.getstate())).encode()).hexdigest()[:16]

    def soon(self, mean_s: float) -> float:
        """Return a random time in seconds, exponentially distributed."""
        return self.random.expovariate(1 / mean_s)

    @contextlib.contextmanager
    def in_process(self, name: str) -> Iterator[None]:
        """Treat callbacks that are posted inside this context as posted by a thread of this process."""
        before, self.process = self.process, name
        try:
            yield
        finally:
            self.process = before

    def stop_process(self, name: str) -> None:
        """Stop running the tasks and timers of this process, as SIGSTOP does: all that were created in a context with its name."""
        self._stopped[name] = []

    def continue_process(self, name: str) -> None:
        self._ready.extend(self._stopped.pop(name))

    # What asyncio calls -------------------------------------------------------------------------------------------------------------

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        handle = _Posted(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Call the function on this thread, at a random later time."""
        done: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self.soon(_EXECUTOR_S), call)
        return done

    def _run_once(self) -> None:
        """Run one callback."""
        scheduled = self._scheduled
        while scheduled and (scheduled[0]._cancelled or not self._ready or scheduled[0]._when <= self.now):
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self.now = max(self.now, timer._when)
                self._ready.append(timer)
        if not self._ready:
            raise Deadlock("no callback is ready and no timer is set")
        handle = self._chosen()
        if (waiting := self._stopped.get(handle._context.get(PROCESS, ""))) is not None:
            waiting.append(handle)
        elif not handle._cancelled:
            handle._run()

    def _chosen(self) -> Handle:
        at = self.random.randrange(len(self._ready))
        handle = self._ready[at]
        if isinstance(handle, _Posted):
            at = next(i for i, each in enumerate(self._ready) if isinstance(each, _Posted) and each.process == handle.process)
            handle = self._ready[at]
        del self._ready[at]
        return handle

    def _write_to_self(self) -> None:
        """Do nothing, because there is no selector to wake."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing, because there are no sockets."""


def run(loop: SimulatedLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end with all clocks virtual, then cancel what is left. Errors that nobody saw are in `loop.broken`."""
    chance = random.getstate()
    random.seed(loop.random.random())
    gc.disable()  # a garbage collection would close generators at times that do not depend on the seed
    try:
        with _virtual_time(loop):
            try:
                return loop.run_until_complete(main)
            finally:
                _end(loop)
    finally:
        gc.enable()
        random.setstate(chance)


def _end(loop: SimulatedLoop) -> None:
    """Cancel all tasks and close the loop."""
    loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))  # also the tasks that generators started when they were closed
    loop.close()


async def _cancel(left: set["asyncio.Task[Any]"]) -> None:
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@contextlib.contextmanager
def _virtual_time(loop: SimulatedLoop) -> Iterator[None]:
    """All clocks show the loop's time. A thread's CPU time stands still, so that no grammar is found too slow."""
    clocks: dict[str, Callable[[], float]] = {
        "time.monotonic": loop.time,
        "time.perf_counter": loop.time,
        "time.time": lambda: loop.epoch,
        "time.thread_time": lambda: 0.0,
    }
    with contextlib.ExitStack() as patches:
        for name, clock in clocks.items():
            patches.enter_context(mock.patch(name, clock))
        yield


def _described(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return context["message"] if error is None else f"{context['message']}: {error!r}"
