"""Returns freed memory to the system after unusually large requests.

The C allocator keeps freed pages for later requests, and ONNX Runtime's arena keeps the memory of its largest run. After a large request
the arena shrinks, if the process has an encoder on the CPU, and `malloc_trim` releases freed pages, on a thread of its own. After a long
run the arena shrinks at once (`onnx.shrinking`).
"""

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from service.runtime.onnx import shrink_arena

# Freed memory is released after a request with more tokens than this, or if all bodies and answers in progress had more bytes than this.
LARGE_BYTES, LARGE_TOKENS = 1_000_000, 2_048
_LEAST_S = 5.0  # least seconds between two releases, because each takes milliseconds and released pages may be needed again


class Release:
    """Releases freed pages at most once in `_LEAST_S` seconds, and once after the last call of `request`. Thread-safe."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._trim = trim or _release_all
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._last = -_LEAST_S

    def request(self) -> None:
        """Schedule a release of freed pages. Call it when a large object has been freed or soon will be."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(max(self._last + _LEAST_S - time.monotonic(), 1.0), self._release)
                self._timer.daemon = True
                self._timer.start()

    def _release(self) -> None:
        with self._lock:
            self._timer = None
            self._last = time.monotonic()
        self._trim()


def _release_all() -> None:
    try:
        shrink_arena()
    finally:
        with suppress(OSError, AttributeError):  # only glibc has `malloc_trim`
            ctypes.CDLL(None).malloc_trim(0)
