"""Memory that was needed once is given back.

The allocator of C keeps freed pages for the next request, and ONNX Runtime's arena those of the largest run. After something unusual the
arena gives back what it has grown by (`runtime.shrinking`), and the allocator is asked to, on a thread on which nothing waits for it.
"""

import ctypes
import threading
import time
from collections.abc import Callable

LARGE_BYTES, LARGE_TOKENS = 1_000_000, 2_048  # of all requests at a time, and of one of them, after which pages are given back
_LEAST_S = 5.0  # between two times: it takes some milliseconds, and costs the pages that are needed again


class Release:
    """`asked` may be called at any time from any thread; what it starts comes at most once in `_LEAST_S`, and once after the last call."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._last = -_LEAST_S

    def asked(self) -> None:
        """Something large was freed, or is about to be."""
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


def _malloc_trim() -> Callable[[], None]:
    """Of glibc; elsewhere nothing."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda: None
    return lambda: trim(0)
