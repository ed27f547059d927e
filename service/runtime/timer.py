"""A timer that is reset far more often than it rings."""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls `ring` on the event loop. To set it costs an assignment; a timer of the loop is only made for the first time it may ring."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float) -> None:
        """Ring then, unless it is reset or cleared before. It may ring late if it was set to a later time before."""
        self._at = self._loop.time() + after_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._at, self._look)

    def clear(self) -> None:
        self._at = math.inf

    def stop(self) -> None:
        """Clear it; it is not used again."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._at == math.inf:
            return
        if self._loop.time() < self._at:
            self._timer = self._loop.call_at(self._at, self._look)
        else:
            self.clear()
            self._ring()
