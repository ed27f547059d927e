"""The histogram of one value many times is prometheus_client's histogram."""

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from service.telemetry.metrics import Histogram


def test_it_is_exposed_as_the_one_it_stands_for() -> None:
    values = [0.0005, 0.001, 0.0011, 0.5, 2, 2.5, 100]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets = (0.001, 0.5, 2)
    histogram = Histogram("gap_seconds", "Between two", ["model"], buckets=buckets, registry=ours)
    reference = prometheus_client.Histogram("gap_seconds", "Between two", ["model"], buckets=buckets, registry=theirs)
    for times, value in enumerate(values):
        histogram.labels("a").observe(value, times)
        for _ in range(times):
            reference.labels("a").observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
