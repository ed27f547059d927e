"""The real service: `attnserve serve` in a process of its own, with Ray and HAProxy, on a free port."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtest.common.server import Service

_STOP_S = 600.0  # longer than this is a hang, also on a slow machine whose cores others use


class LiveService(Service):
    """A running `attnserve serve`. Its environment is that of the tests."""

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False, wait_s: float = _STOP_S) -> int:
        return super().stop(number, group=group, wait_s=wait_s)


@contextmanager
def live(bundles: Sequence[Path], *flags: str, **how: Any) -> Iterator[LiveService]:
    """A service that is ready, stopped at the end whatever happens."""
    service = LiveService(bundles, *flags, **how)
    try:
        service.wait_for("ready at")
        yield service
    finally:
        service.stop()
