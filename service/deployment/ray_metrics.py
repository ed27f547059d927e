"""Copies this process's metrics into Ray's metrics, because replicas on a cluster have no port that Prometheus could scrape.

Ray's exporter on each node has the metrics of every process on the node, labelled with deployment, replica and application. It prefixes
names with `ray_` and allows no `:` in them. deploy/prometheus/scrape.yaml restores the names, so that the same rules and
dashboards work on one machine and on a cluster.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from prometheus_client.registry import CollectorRegistry

log = logging.getLogger("attnserve")

EVERY_S = 10.0  # seconds between two copies, the same as Ray's own interval


class Gauge(Protocol):
    """The interface of `ray.serve.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]  # (name, description, label names)


class RayMetrics:
    """A thread that copies every sample that /metrics shows, including histogram buckets and totals of counters, into a gauge of Ray."""

    def __init__(self, registry: CollectorRegistry, make_gauge: MakeGauge, *, every_s: float = EVERY_S) -> None:
        self._registry = registry
        self._make_gauge = make_gauge
        self._every_s = every_s
        self._gauges: dict[str, Gauge] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ray-metrics", daemon=True)

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
            except Exception:  # any error, because the thread must survive a copy that fails
                log.exception("metrics could not be copied to Ray's exporter")
