"""What the service counts, in Prometheus form.

Names that dashboards of text-embeddings-inference know are kept (`te_*`); what it does not have is called `attnserve_*`.
"""

from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, that says when the process started

_SECONDS = tuple(1.5e-5 * 1.5**n for n in range(35))  # the buckets of text-embeddings-inference
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All series of one process, on a registry of its own so that several can live in one test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        # prometheus_client would add _total to a counter's name, and dashboards look for these without.
        self.requests = gauge("te_request_count", "Requests taken", ["method", "model"])
        self.successes = gauge("te_request_success", "Requests answered", ["method", "model"])
        self.failures = gauge("te_request_failure", "Requests refused or failed", ["err", "model"])
        self.duration = histogram("te_request_duration", "Seconds from request to answer", ["method", "model"], buckets=_SECONDS)
        self.tokenization = histogram("te_request_tokenization_duration", "Seconds of tokenisation, a request", ["model"], buckets=_SECONDS)
        self.queueing = histogram("te_request_queue_duration", "Seconds in the queue, the head of each batch", ["model"], buckets=_SECONDS)
        self.inference = histogram("te_request_inference_duration", "Seconds of one runtime call", ["model"], buckets=_SECONDS)
        self.input_length = histogram("te_request_input_length", "Tokens of one input after any cut", ["model"], buckets=_TOKENS)
        self.queue_size = gauge("te_queue_size", "Inputs waiting", ["model"])
        self.batch_size = histogram("te_batch_next_size", "Inputs in a batch", ["model"], buckets=_ITEMS)
        self.batch_tokens = histogram("te_batch_next_tokens", "Tokens in a batch, padding included", ["model"], buckets=_TOKENS)
        self.queue_tokens = gauge("attnserve_queue_tokens", "Tokens waiting", ["model"])
        self.tokens = counter("attnserve_tokens", "Tokens computed, padding not counted", ["model"])
        self.padding = counter("attnserve_padding_tokens", "Padding computed for nothing", ["model"])
        self.rate = gauge("attnserve_tokens_per_second", "Measured rate of the runtime, all callers together", ["model"])
        self.dropped = counter("attnserve_dropped_inputs", "Inputs cancelled or expired before they ran", ["model"])
        self.cache_hits = counter("attnserve_cache_hits", "Inputs answered from the cache", ["model"])
        self.joined = counter("attnserve_joined_inputs", "Inputs that joined an equal one already on its way", ["model"])
        self.cache_bytes = gauge("attnserve_cache_bytes", "Bytes of cached vectors")
        self.bad_outputs = counter("attnserve_bad_outputs", "Rows with NaN, Inf or no length, withheld", ["model"])
        self.truncated = counter("attnserve_truncated_inputs", "Inputs that were cut", ["model"])
        self.active = gauge("attnserve_active_requests", "Requests between their first byte and their last")
        self._route = cache(self._look_up)  # as few entries as routes and models; a look-up by labels costs more than the counting
        self.ready = gauge("attnserve_ready", "1 when the model answers", ["model"])

    def request(self, route: str, model: str, status: int, elapsed_s: float) -> None:
        """Count one request that was answered, refused or given up."""
        count, duration, successes = self._route(route, model)
        count.inc()
        duration.observe(elapsed_s)
        if status < 400:
            successes.inc()
        else:
            self.failures.labels(str(status), model).inc()

    def _look_up(self, route: str, model: str) -> tuple[Gauge, Histogram, Gauge]:
        return self.requests.labels(route, model), self.duration.labels(route, model), self.successes.labels(route, model)


class ModelMetrics:
    """The same for one model, with the label looked up once instead of at each use."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.queue_size = metrics.queue_size.labels(model)
        self.queueing = metrics.queueing.labels(model)
        self.inference = metrics.inference.labels(model)
        self.input_length = metrics.input_length.labels(model)
        self.batch_size = metrics.batch_size.labels(model)
        self.batch_tokens = metrics.batch_tokens.labels(model)
        self.queue_tokens = metrics.queue_tokens.labels(model)
        self.tokens = metrics.tokens.labels(model)
        self.padding = metrics.padding.labels(model)
        self.rate = metrics.rate.labels(model)
        self.dropped = metrics.dropped.labels(model)
        self.cache_hits = metrics.cache_hits.labels(model)
        self.joined = metrics.joined.labels(model)
        self.bad_outputs = metrics.bad_outputs.labels(model)
        self.truncated = metrics.truncated.labels(model)
        self.tokenization = metrics.tokenization.labels(model)
        self.cache_bytes = metrics.cache_bytes
        self.ready = metrics.ready.labels(model)
