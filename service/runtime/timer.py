"""A timer that is cheap to reset, for timeouts that are reset often and rarely expire."""

import asyncio
import math
from collections.abc import Callable


class ResettableTimer:
    """Calls `callback` on the event loop after a time that can be reset. A reset only assigns the new time. If the event loop's own timer
    then fires too early, it is started again.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float) -> None:
        """Call `callback` after `after_s` seconds, unless the timer is set again, cleared or stopped before. If the timer is already
        set to a later time, the callback may be called as late as that time.
        """
        self._at = self._loop.time() + after_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._at, self._check)

    def clear(self) -> None:
        self._at = math.inf

    def stop(self) -> None:
        """Clear the timer permanently."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._at == math.inf:
            return
        if self._loop.time() < self._at:
            self._timer = self._loop.call_at(self._at, self._check)
        else:
            self.clear()
            self._callback()
