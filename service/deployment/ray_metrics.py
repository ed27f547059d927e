"""Copies this process's metrics into Ray's metrics, because replicas on a cluster have no port that Prometheus could scrape.

Ray's exporter on each node has the metrics of every process on the node, labelled with deployment, replica and application. It prefixes
names with `ray_` and allows no `:` in them. deploy/prometheus/scrape.yaml restores the names, so that the same rules and
dashboards work on one machine and on a cluster.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from prometheus_client.registry import CollectorRegistry

log = logging.getLogger("attnserve")

EVERY_S = 10.0  # seconds between two copies, the same as Ray's own interval


class Gauge(Protocol):
    """The interface of `ray.serve.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]  # (name, description, label names)


def copy(registry: CollectorRegistry, make_gauge: MakeGauge, gauges: dict[str, Gauge]) -> None:
    """Copy every sample that /metrics shows, including histogram buckets and totals of counters, into a gauge of Ray, one a name."""
    for family in registry.collect():
        for sample in family.samples:
            name = sample.name.replace(":", "_")
            if name not in gauges:
                gauges[name] = make_gauge(name, family.documentation, tuple(sample.labels))
            gauges[name].set(sample.value, dict(sample.labels))


def keep_copying(registry: CollectorRegistry, make_gauge: MakeGauge) -> None:
    """Copy all samples every `EVERY_S` seconds, as long as the process lives."""
    gauges: dict[str, Gauge] = {}
    while True:
        time.sleep(EVERY_S)
        try:
            copy(registry, make_gauge, gauges)
        except Exception:  # the thread must survive any copy that fails
            log.exception("metrics could not be copied to Ray's exporter")
