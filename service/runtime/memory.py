"""Memory goes back to the system after unusual requests.

C's allocator keeps freed pages for the next request, and ONNX Runtime's arena keeps those of its largest run. After an unusual run the
arena releases what it has grown by (`runtime.shrinking`), and `malloc_trim` releases freed pages, on a thread of its own.
"""

import ctypes
import threading
import time
from collections.abc import Callable

LARGE_BYTES, LARGE_TOKENS = 1_000_000, 2_048  # of all requests at a time, and of one of them, after which pages are given back
_LEAST_S = 5.0  # between two times: it takes some milliseconds, and costs the pages that are needed again


class Release:
    """`asked` may be called at any time from any thread. It trims at most once in `_LEAST_S`, and once after the last call."""

    def __init__(self, trim: Callable[[], None] | None = None) -> None:
        self._trim = trim or _malloc_trim()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._last = -_LEAST_S

    def asked(self) -> None:
        """A large object was freed, or is about to be."""
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
