"""Keeps the metrics of the last minute in memory, so that the charts of the console have a past when it is opened."""

import asyncio
import time
import zlib
from collections import deque
from typing import TypedDict

from service.telemetry.metrics import Metrics

EVERY_S = 5.0
KEPT = 13  # samples, of which the oldest is a minute old


class Sample(TypedDict):
    age_s: float
    metrics: str  # in Prometheus' text format, without comments


class History:
    """The last `KEPT` samples of a process's metrics, compressed: some 10 kB each."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=KEPT)

    async def watch(self) -> None:
        """Take a sample every `EVERY_S` seconds, on a thread, until cancelled."""
        while True:
            await asyncio.to_thread(self.record, time.monotonic())
            await asyncio.sleep(EVERY_S)

    def record(self, now_s: float) -> None:
        """Take a sample. It replaces the oldest one if there are `KEPT`."""
        lines = [line for line in self._metrics.exposition().splitlines(keepends=True) if not line.startswith(b"#")]
        self._samples.append((now_s, zlib.compress(b"".join(lines), 1)))

    def samples(self, now_s: float) -> list[Sample]:
        """Return the samples with their age in seconds, the oldest first."""
        return [{"age_s": round(now_s - at_s, 3), "metrics": zlib.decompress(kept).decode()} for at_s, kept in list(self._samples)]
