"""Metrics of the service, for Prometheus.

Metrics of encoders are named as in text-embeddings-inference (`te_*`) and those of decoders as in vLLM (`vllm:*`, from its
`vllm/v1/metrics/loggers.py`), so that existing dashboards work. All other metrics are named `attnserve_*`.
"""

from bisect import bisect_left
from functools import cache, partial
from typing import Literal, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from service.telemetry.usage import Usage

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would add a second series to each counter, with the start time of the process

# Few buckets, because each bucket is a series for every route, model and replica. They include the thresholds of the objectives in
# deploy/chart/rules/rules.yaml.
_ANSWER_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STEP_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The reasons why the prefix cache had no state for a prompt.
Miss = Literal["disabled", "short", "new", "boundary", "evicted", "model", "numerics"]
# About half of vLLM's buckets, and additional finer buckets for short times, because a small decoder on a CPU takes about a millisecond
# per token.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40, 160)
_BETWEEN_TOKENS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 30, 60, 120, 300, 960)
_COUNTERS_WITHOUT_TOTAL = ("te_request_count", "te_request_success", "te_request_failure")


class Histogram(prometheus_client.Histogram):
    """A histogram that counts a value several times in one call, because a decode step takes equally long for all its runs."""

    def observe(self, amount: float, times: int = 1) -> None:  # type: ignore[override]
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


class Metrics:
    """All metrics of one process, in a registry of their own, so that a test can create several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        # Counters are made as gauges, because prometheus_client would add _total to their names. `exposition` declares them as counters.
        self.requests = gauge("te_request_count", "Requests taken", ["method", "model"])
        self.successes = gauge("te_request_success", "Requests answered", ["method", "model"])
        self.failures = gauge("te_request_failure", "Requests refused or failed", ["err", "model"])
        self.duration = histogram(
            "te_request_duration", "Seconds from request to answer, if it was answered", ["method", "model", "lane"], buckets=_ANSWER_S
        )
        self.tokenization = histogram("te_request_tokenization_duration", "Seconds of tokenisation, a request", ["model"], buckets=_STEP_S)
        self.queueing = histogram("te_request_queue_duration", "Seconds in the queue, the head of each batch", ["model"], buckets=_STEP_S)
        self.inference = histogram("te_request_inference_duration", "Seconds of one runtime call", ["model"], buckets=_STEP_S)
        self.input_length = histogram("te_request_input_length", "Tokens of one input after any cut", ["model"], buckets=_TOKENS)
        self.queue_size = gauge("te_queue_size", "Inputs waiting", ["model"])
        self.batch_size = histogram("te_batch_next_size", "Inputs in a batch", ["model"], buckets=_ITEMS)
        self.batch_tokens = histogram("te_batch_next_tokens", "Tokens in a batch, padding included", ["model"], buckets=_TOKENS)
        self.queue_tokens = gauge("attnserve_queue_tokens", "Tokens waiting", ["model"])
        self.tokens = counter("attnserve_tokens", "Tokens computed, padding not counted", ["model"])
        self.padding = counter("attnserve_padding_tokens", "Padding computed for nothing", ["model"])
        self.rate = gauge("attnserve_tokens_per_second", "Measured rate of the runtime, all callers together", ["model"])
        self.offered = counter(
            "attnserve_offered_seconds", "Work asked for, refused included, in seconds that take all of the engine", ["model"]
        )
        self.dropped = counter("attnserve_dropped_inputs", "Inputs cancelled or expired before they ran", ["model"])
        self.cache_hits = counter("attnserve_cache_hits", "Inputs answered from the cache", ["model"])
        self.joined = counter("attnserve_joined_inputs", "Inputs that joined an equal one already on its way", ["model"])
        self.cache_bytes = gauge("attnserve_cache_bytes", "Bytes of cached vectors")
        self.bad_outputs = counter("attnserve_bad_outputs", "Rows with NaN, Inf or no length, withheld", ["model"])
        self.truncated = counter("attnserve_truncated_inputs", "Inputs that were cut", ["model"])
        self.active = gauge("attnserve_active_requests", "Requests between their first byte and their last")
        self.tenant_requests = counter("attnserve_tenant_requests", "Requests of a tenant, refused ones among them", ["tenant"])
        self.tenant_tokens = counter("attnserve_tenant_tokens", "Tokens of a tenant: prompt or completion", ["tenant", "kind"])
        self.tenant_limited = counter("attnserve_tenant_limited", "Requests refused by a tenant's own limits", ["tenant"])
        self.unstored_runs = counter(
            "attnserve_unstored_runs", "Failures to store a stream's run: until the next success it cannot be continued", ["reason"]
        )
        self.tenant = cache(partial(TenantMetrics, self))
        named = ["model_name"]
        self.running = gauge("vllm:num_requests_running", "Runs that have a slot", named)
        self.slots = gauge("attnserve_slots", "Sequences that a decoder continues at the same time, at most", ["model"])
        self.waiting = gauge("vllm:num_requests_waiting", "Runs that wait for a slot", named)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens read", named)
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", named)
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Of these, tokens found", named)
        self.prefix_misses = counter("attnserve_prefix_cache_misses", "Prompts of which no beginning was found", ["model", "reason"])
        # Metrics of the store of states. All processes that share a store report the same number, so take the largest, not the sum.
        self.states = gauge("attnserve_states", "States in the store, of all tenants")
        self.state_bytes = gauge("attnserve_state_bytes", "Bytes of states and documents in the store, shared ones once")
        self.states_ended = counter("attnserve_states_ended", "States that are gone: deleted, expired, evicted or damaged", ["reason"])
        self.damaged_blobs = counter("attnserve_state_damaged_blobs", "Stored bytes of states that were found damaged, and set apart")
        self.store_seconds = histogram(
            "attnserve_state_store_seconds", "Seconds of one group of calls of the store, until it is durable", buckets=_STEP_S
        )
        self.store_trouble = gauge(
            "attnserve_state_store_trouble", "1 while the store is full, its files are lost or damaged, or its last call failed", ["reason"]
        )
        self.store_queue = gauge("attnserve_state_store_queue", "Calls that wait for the store")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens drawn", named)
        self.guessed_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens guessed from a run's own text and computed", named)
        self.right_guesses = counter("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were drawn", named)
        self.finished = counter("vllm:request_success", "Runs that ended: stop, length, abort or error", [*named, "finished_reason"])
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to first token", named, buckets=_FIRST_TOKEN_S)
        self.between_tokens = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a run", named, buckets=_BETWEEN_TOKENS_S)
        self.run_time = histogram("vllm:e2e_request_latency_seconds", "From arrival to last token", named, buckets=_REQUEST_S)
        self.run_queueing = histogram("vllm:request_queue_time_seconds", "From arrival to a slot", named, buckets=_REQUEST_S)
        # Cached by route and model, because `labels` takes longer than counting.
        self._requests_of, self._answers_of = cache(self.requests.labels), cache(self._answers)
        self.ready = gauge("attnserve_ready", "1 when the model answers", ["model"])

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format."""
        text = generate_latest(self.registry)
        for name in _COUNTERS_WITHOUT_TOTAL:
            text = text.replace(f"# TYPE {name} gauge\n".encode(), f"# TYPE {name} counter\n".encode())
        return text

    def request(self, route: str, model: str, status: int, elapsed_s: float, *, bulk: bool = False) -> None:
        """Count one request that was answered, rejected or abandoned. `bulk` is true for the bulk lane.

        As in text-embeddings-inference, only requests that a model answered are timed. Rejections and probes are short, so they would lower
        the durations.
        """
        self._requests_of(route, model).inc()
        if status < 400:
            successes, duration = self._answers_of(route, model, bulk)
            successes.inc()
            if duration is not None:
                duration.observe(elapsed_s)
        else:
            self.failures.labels(str(status), model).inc()

    def forget_tenant(self, name: str) -> None:
        """Remove the tenant's series."""
        self.tenant_requests.remove(name)
        self.tenant_limited.remove(name)
        for kind in ("prompt", "completion"):
            self.tenant_tokens.remove(name, kind)
        self.tenant.cache_clear()

    def _answers(self, route: str, model: str, bulk: bool) -> tuple[Gauge, Histogram | None]:
        lane = "bulk" if bulk else "interactive"
        return self.successes.labels(route, model), self.duration.labels(route, model, lane) if model else None


class TenantMetrics:
    """The metrics of one tenant. `service/http/keys.py` limits the number of tenants."""

    def __init__(self, metrics: Metrics, tenant: str) -> None:
        self.limited = metrics.tenant_limited.labels(tenant)
        self._requests = metrics.tenant_requests.labels(tenant)
        self._prompt_tokens = metrics.tenant_tokens.labels(tenant, "prompt")
        self._completion_tokens = metrics.tenant_tokens.labels(tenant, "completion")

    def request(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count one finished request."""
        self._requests.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._completion_tokens.inc(completion_tokens)


class ModelMetrics:
    """The metrics of one encoder, with the label `model` already set."""

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
        self.offered = metrics.offered.labels(model)
        self.dropped = metrics.dropped.labels(model)
        self.cache_hits = metrics.cache_hits.labels(model)
        self.joined = metrics.joined.labels(model)
        self.bad_outputs = metrics.bad_outputs.labels(model)
        self.truncated = metrics.truncated.labels(model)
        self.tokenization = metrics.tokenization.labels(model)
        self.cache_bytes = metrics.cache_bytes
        self.ready = metrics.ready.labels(model)


class GeneratorMetrics:
    """The metrics of one decoder."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.ready = metrics.ready.labels(model)
        self.slots = metrics.slots.labels(model)
        self.running = metrics.running.labels(model)
        self.waiting = metrics.waiting.labels(model)
        self.offered = metrics.offered.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self._looked_up = metrics.prefix_queries.labels(model)
        self._found = metrics.prefix_hits.labels(model)
        self._missed = {reason: metrics.prefix_misses.labels(model, reason) for reason in get_args(Miss)}
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.guessed_tokens = metrics.guessed_tokens.labels(model)
        self.right_guesses = metrics.right_guesses.labels(model)
        self.first_token_s = metrics.first_token.labels(model)
        self.between_tokens_s = metrics.between_tokens.labels(model)
        self.queue_s = metrics.run_queueing.labels(model)
        self._run_s = metrics.run_time.labels(model)
        self._finished = {reason: metrics.finished.labels(model, reason) for reason in ("stop", "length", "abort", "error")}

    def looked_up(self, tokens: int, found: int, miss: Miss | None) -> None:
        """Count a prompt of `tokens` tokens that was looked up in the prefix cache. The cache had the state after the first `found` of
        them. `miss` is the reason if nothing was found, else None."""
        self._looked_up.inc(tokens)
        self._found.inc(found)
        if miss is not None:
            self._missed[miss].inc()

    def finished(self, reason: Literal["stop", "length", "abort", "error"], usage: Usage) -> None:
        """Count one finished run. The reason `abort` means that the client cancelled it. `usage.finished` must be set."""
        assert usage.finished is not None
        self._finished[reason].inc()
        self._run_s.observe(usage.finished - usage.submitted)
