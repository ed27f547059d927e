"""Limits on the request bodies that are being received: each body must make progress, and the number of bodies is limited.

A body may pause for `body_grace_s` seconds. Each byte extends its deadline by 1 / `min_body_bytes_per_s` seconds, to at most `body_grace_s`
seconds from now. So the memory and the connection of a body that stops after 32 MiB, or arrives slowly, are freed. If there are too
many bodies, the body that has waited longest for its next bytes is refused.
"""

import asyncio
import time
from types import TracebackType

from service.errors import BodyTooSlow, Overloaded, ServiceError
from service.settings import Settings

MOST_UPLOADS = 1024
_SWEEP_S = 0.25


class Uploads:
    """The bodies that one event loop receives. One timer checks all bodies, so a body that arrives together with its headers costs only one
    dictionary entry.
    """

    def __init__(self) -> None:
        self._open: dict[Upload, None] = {}  # bodies; the one that has received nothing for the longest time is first
        self._sweeping = False

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, settings: Settings) -> "Upload":
        """Return a context manager inside which the current task reads one body."""
        return Upload(self, settings)

    def add(self, upload: "Upload") -> None:
        if len(self._open) >= MOST_UPLOADS:
            oldest = next(iter(self._open))
            oldest.end(
                Overloaded(f"Service is overloaded: {MOST_UPLOADS} bodies are on their way, and this one waited longest", retry_after_s=1.0)
            )
        self._open[upload] = None
        if not self._sweeping:
            self._sweeping = True
            self._sweep_at(time.monotonic() + _SWEEP_S)

    def again(self, upload: "Upload") -> None:
        """Move a body to the end of the order, because some of its bytes have arrived."""
        if self._open.pop(upload, 0) is None:
            self._open[upload] = None

    def remove(self, upload: "Upload") -> None:
        self._open.pop(upload, None)

    def _sweep_at(self, moment: float) -> None:
        asyncio.get_running_loop().call_later(max(moment - time.monotonic(), 0), self._sweep, moment)

    def _sweep(self, due: float) -> None:
        now = time.monotonic()
        # Deadlines are compared with `due` and not `now`: bytes that arrived while the event loop was blocked are not read yet.
        for upload in [each for each in self._open if each.deadline < due]:
            upload.end(upload.too_slow())
        if self._open:
            self._sweep_at(now + _SWEEP_S)
        else:
            self._sweeping = False


class Upload:
    """One body that is being received. `end(error)` raises the error inside the `with` block."""

    __slots__ = ("_error", "_settings", "_task", "_uploads", "bytes", "deadline")

    def __init__(self, uploads: Uploads, settings: Settings) -> None:
        self._uploads = uploads
        self._settings = settings
        self._task = asyncio.current_task()
        self._error: ServiceError | None = None
        self.bytes = 0
        self.deadline = time.monotonic() + settings.body_grace_s

    def __enter__(self) -> "Upload":
        self._uploads.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._uploads.remove(self)
        if self._error is not None and self._task is not None:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._error from None

    def came(self, size: int) -> None:
        """Record that `size` more bytes of a still incomplete body have arrived, and extend the body's deadline."""
        self.bytes += size
        if size:
            bought = self.deadline + size / self._settings.min_body_bytes_per_s
            self.deadline = min(bought, time.monotonic() + self._settings.body_grace_s)
            self._uploads.again(self)

    def end(self, error: ServiceError) -> None:
        self._error = error
        self._uploads.remove(self)
        assert self._task is not None
        self._task.cancel()

    def too_slow(self) -> BodyTooSlow:
        rate, grace_s = self._settings.min_body_bytes_per_s, self._settings.body_grace_s
        return BodyTooSlow(
            f"the body stopped after {self.bytes} bytes for {grace_s:g} s, or came at less than {rate} bytes a second: send it "
            "faster, or in parts"
        )
