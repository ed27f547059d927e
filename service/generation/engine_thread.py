"""The thread that an engine's runtime, states and searches belong to, and how it fares."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from service.metrics import GeneratorMetrics


class EngineThread:
    """What engines of one thread have in common. `start` belongs to the event loop that their callers live on."""

    def __init__(self, name: str, metrics: GeneratorMetrics) -> None:
        self.metrics = metrics
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
    def alive(self) -> bool:
        return self._thread is None or self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Started, alive, and the last call of the runtime succeeded."""
        return self._thread is not None and self.alive and not self._last_call_failed

    @property
    def stuck_s(self) -> float:
        """Seconds since the call of the runtime that has not ended began; 0 when none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _work(self) -> None:
        """The body of the thread. It returns after `_close`, when every caller has its answer."""
        raise NotImplementedError

    def _close(self) -> None:
        """Admit no more work, and let the thread end. Called on the loop."""
        raise NotImplementedError

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """From the thread: a call on the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)
