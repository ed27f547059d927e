"""The thread on which an engine computes, and its health."""

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from service.runtime.offered import OfferedSlots
from service.telemetry.metrics import GeneratorMetrics


class EngineThread(ABC):
    """Base of engines that compute on one thread. `start` is called on the event loop of their callers."""

    def __init__(self, name: str, slots: int, metrics: GeneratorMetrics) -> None:
        """`slots`: runs that it computes at the same time."""
        self.metrics = metrics
        self.offered = OfferedSlots(slots, metrics.offered.inc)
        self._slots = slots
        metrics.slots.set(slots)
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._last_call_failed = False
        self._began: float | None = None  # the runtime's call

    def start(self) -> None:
        """Start the thread. Call it on the callers' event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()
        self.metrics.ready.set(1)

    async def stop(self) -> None:
        """End every run with NotReady, then the thread."""
        self._close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self.metrics.ready.set(0)

    @property
    @abstractmethod
    def pending(self) -> int:
        """Slots that are taken or waited for."""

    @property
    def full(self) -> bool:
        """No slot is free for one more run."""
        return self.pending >= self._slots

    def refused(self, runs: float) -> None:
        """Count runs that a gateway has refused for this engine or another replica of it."""
        self.offered.refuse(runs)

    @property
    def alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Started, alive, and the last call of the runtime succeeded."""
        return self._thread is not None and self.alive and not self._last_call_failed

    @property
    def stuck_s(self) -> float:
        """Seconds since the runtime's current call began; 0 if none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @abstractmethod
    def _work(self) -> None:
        """The body of the thread. It returns after `_close`, when every caller has its answer."""

    @abstractmethod
    def _close(self) -> None:
        """Admit no more work, and let the thread end. Called on the loop."""

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """From the thread: a call on the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)
