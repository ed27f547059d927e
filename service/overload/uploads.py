"""Limits on the request bodies that are being received: each body must make progress, and the number of bodies is limited.

A body may pause for `body_grace_s` seconds. Each byte extends its deadline by 1 / `min_body_bytes_per_s` seconds, to at most `body_grace_s`
seconds from now. So the memory and the connection of a body that stops after 32 MiB, or arrives slowly, are freed. If there are too
many bodies, the body that has waited longest for its next bytes is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.errors import BodyTooSlow, Overloaded, ServiceError
from service.settings import Settings

MOST_UPLOADS = 1024


class Uploads:
    """The bodies that one event loop receives."""

    def __init__(self) -> None:
        self._open: dict[Upload, None] = {}  # the body that has received nothing for the longest time is first

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def begin(self, settings: Settings) -> AsyncIterator["Upload"]:
        """Inside this context, the current task reads one body. Raises BodyTooSlow, or Overloaded if too many bodies are being received."""
        if len(self._open) >= MOST_UPLOADS:
            next(iter(self._open)).give_way()
        upload = Upload(self._open, settings)
        self._open[upload] = None
        try:
            async with upload.timeout:
                yield upload
        except TimeoutError:
            raise upload.refusal from None
        finally:
            self._open.pop(upload, None)


class Upload:
    """One body that is being received. When its timeout ends, `refusal` is raised."""

    def __init__(self, opened: "dict[Upload, None]", settings: Settings) -> None:
        self.timeout = asyncio.timeout(settings.body_grace_s)
        self.bytes = 0
        self._open, self._settings = opened, settings
        self._given_way = False

    def came(self, size: int) -> None:
        """Record that `size` more bytes of a still incomplete body have arrived, and extend the body's deadline."""
        self.bytes += size
        if size and not self.timeout.expired() and not self._given_way:
            at, latest = self.timeout.when() or 0.0, asyncio.get_running_loop().time() + self._settings.body_grace_s
            self.timeout.reschedule(min(at + size / self._settings.min_body_bytes_per_s, latest))
            del self._open[self]
            self._open[self] = None

    def give_way(self) -> None:
        """End this upload, because there are too many."""
        del self._open[self]
        self._given_way = True
        if not self.timeout.expired():
            self.timeout.reschedule(0)

    @property
    def refusal(self) -> ServiceError:
        if self._given_way:
            said = f"Service is overloaded: {MOST_UPLOADS} bodies are on their way, and this one waited longest"
            return Overloaded(said, retry_after_s=1.0)
        rate, grace_s = self._settings.min_body_bytes_per_s, self._settings.body_grace_s
        return BodyTooSlow(
            f"the body stopped after {self.bytes} bytes for {grace_s:g} s, or came at less than {rate} bytes a second: send it "
            "faster, or in parts"
        )
