"""Ray gets what /metrics says, under names that it takes."""

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.deployment import ray_metrics
from service.deployment.ray_metrics import copy, keep_copying
from service.telemetry.metrics import GeneratorMetrics, Metrics, ModelMetrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Rays:
    """Gauges as Ray makes them: a name without `:`, and every label it was made with at every value."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def gauge(self, name: str, description: str, labels: tuple[str, ...]) -> "_Gauge":
        assert ":" not in name
        assert description
        return _Gauge(self, name, labels)


class _Gauge:
    def __init__(self, rays: Rays, name: str, labels: tuple[str, ...]) -> None:
        self._rays, self._name, self._labels = rays, name, labels

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._labels)
        self._rays.samples[self._name, frozenset(tags.items())] = value


def filled() -> Metrics:
    metrics = Metrics()
    encoder, decoder = ModelMetrics(metrics, "mini"), GeneratorMetrics(metrics, "wordy")
    encoder.tokens.inc(7)
    encoder.inference.observe(0.1)
    decoder.running.set(2)
    decoder.between_tokens_s.observe(0.002, 3)
    metrics.request("/v1/embeddings", "mini", 200, 0.1)
    return metrics


def test_every_sample_is_copied_as_metrics_says_it() -> None:
    metrics, rays = filled(), Rays()
    copy(metrics.registry, rays.gauge, {})
    said: Samples = {
        (sample.name.replace(":", "_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }
    assert rays.samples == said
    assert rays.samples["attnserve_tokens_total", frozenset({("model", "mini")})] == 7
    assert rays.samples["vllm_inter_token_latency_seconds_bucket", frozenset({("model_name", "wordy"), ("le", "+Inf")})] == 3


def test_a_copy_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_metrics, "EVERY_S", 0.0)
    registry, calls = CollectorRegistry(), []
    Counter("cats", "Seen", registry=registry)

    def gauge(name: str, description: str, labels: tuple[str, ...]) -> _Gauge:
        calls.append(name)
        raise RuntimeError("no Ray yet") if len(calls) == 1 else KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep_copying(registry, gauge)
    assert calls == ["cats_total"] * 2
