"""Metrics of a store of states. They name no tenant and no state."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

from service.states.backend import Reason, Trouble
from service.states.record import Status, Usage
from service.telemetry.metrics import Metrics


class StateStoreMetrics:
    """An `Observer` of a `Store`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended: Counter[Status] = Counter()
        self._damaged_blobs = 0

    def opened(self, waiting: Callable[[], int], trouble: Callable[[], Trouble | None]) -> None:
        self._metrics.store_queue.set_function(waiting)

        def has(reason: Reason) -> bool:
            found = trouble()
            return found is not None and found.reason == reason

        for reason in get_args(Reason):
            self._metrics.store_trouble.labels(reason).set_function(partial(has, reason))

    def finished(self, elapsed_s: float) -> None:
        self._metrics.store_seconds.observe(elapsed_s)

    def counted(self, ended: Mapping[Status, int], damaged_blobs: int) -> None:
        for reason, number in (Counter(ended) - self._ended).items():
            self._metrics.states_ended.labels(reason).inc(number)
        self._metrics.damaged_blobs.inc(damaged_blobs - self._damaged_blobs)
        self._ended, self._damaged_blobs = Counter(ended), damaged_blobs

    def kept(self, usage: Usage) -> None:
        self._metrics.states.set(usage.states)
        self._metrics.state_bytes.set(usage.size)
