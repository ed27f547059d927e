"""Prometheus' text format, read as Prometheus reads it."""

import re

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str) -> list[Sample]:
    """Every sample under its own name: prometheus_client's parser adds `_total` to those of counters, so it is not told the types."""
    untyped = re.sub(r"^# TYPE .*\n", "", text, flags=re.MULTILINE)
    return [sample for family in text_string_to_metric_families(untyped) for sample in family.samples]


def types(text: str) -> dict[str, str]:
    """The type of each name, as the text says it."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))
