"""Our series once more as Ray's, for replicas behind a gateway: they have no port that Prometheus could ask.

Ray's exporter on each node has the series of every process there, with the deployment, replica and application each belongs to. It puts
`ray_` before a name and allows no `:` in it; deploy/prometheus/scrape.yaml gives both back, so rules and dashboards know one name.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from prometheus_client.registry import CollectorRegistry

log = logging.getLogger("attnserve")

EVERY_S = 10.0  # as often as Ray takes them, and far more often than it forgets a series that is not renewed


class Gauge(Protocol):
    """`ray.serve.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]  # name, description, names of labels


class Mirror:
    """Copies every sample of a registry, each as it would be read from /metrics, buckets and totals of counters included."""

    def __init__(self, registry: CollectorRegistry, make_gauge: MakeGauge, *, every_s: float = EVERY_S) -> None:
        self._registry = registry
        self._make_gauge = make_gauge
        self._every_s = every_s
        self._gauges: dict[str, Gauge] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def copy(self) -> None:
        for family in self._registry.collect():
            for sample in family.samples:
                name = sample.name.replace(":", "_")
                gauge = self._gauges.get(name)
                if gauge is None:
                    gauge = self._gauges[name] = self._make_gauge(name, family.documentation, tuple(sample.labels))
                gauge.set(sample.value, dict(sample.labels))

    def _work(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self.copy()
            except Exception:  # one copy is lost; the thread is not, and neither is what it copies
                log.exception("series could not be handed to Ray")
