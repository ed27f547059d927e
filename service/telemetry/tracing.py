"""OpenTelemetry traces of requests, sent to a collector over OTLP/HTTP. Imported only if `otlp_endpoint` is set.

A request's span begins at the edge. Its child spans are made afterwards, from timestamps that are recorded anyway, so that tracing does
not delay the models. An encoding has the child span `queue`, and `batch` for every batch that computed a part of the request; `batch`
contains the runtime call `run`. A decoder run has `generate`, which contains `queue`, `prefill` and `decode` and the event `first token`.

The W3C traceparent of the request's span is passed through the service and between its processes as a string, or None if the request is
not sampled. OpenTelemetry's `OTEL_TRACES_SAMPLER` selects requests: by default, a request with a traceparent is sampled if
its caller's trace is sampled, and every other request is sampled.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from random import getrandbits
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.call import Call
from service.errors import AttnserveError
from service.runtime.lanes import Origin
from service.telemetry.usage import Usage

_W3C = TraceContextTextMapPropagator()
_EXPORT_S = 5.0  # seconds to send spans; if the collector is slower, spans are dropped, so that a replica can stop in this time
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class TracedRequest(Protocol):
    """The fields of a waiting encoder request that tracing reads; see `service/encoding/batching.py`."""

    arrived: float
    queue_traced: bool
    results: list[Any]

    @property
    def task(self) -> Origin: ...


class TracedInput(Protocol):
    """The fields of one input of a request that tracing reads."""

    ids: list[int]

    @property
    def waiters(self) -> Sequence[tuple[TracedRequest, int]]: ...


class TracingUnavailable(AttnserveError):
    """Tracing is enabled, but its exporter is not installed. The message contains the command to install it."""


def to_collector(endpoint: str) -> "Tracer":
    """Return a tracer that sends to `endpoint`/v1/traces in the background. `OTEL_*` variables set headers, TLS and sampling."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracingUnavailable(
            f"otlp_endpoint={endpoint} enables traces, but their exporter is not installed: pip install 'attnserve[trace]'"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "attnserve")
    provider = TracerProvider(resource=Resource.create({"service.name": name, "service.version": version("attnserve")}))
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


class RequestSpan:
    """The span of one request at the edge, from its first byte to its last."""

    def __init__(self, span: Span, method: str) -> None:
        context = span.get_span_context()
        self._span = span
        self._method = method
        self._trace_id = format_trace_id(context.trace_id)
        self.traceparent = f"00-{self._trace_id}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"

    def mark(self, call: Call) -> None:
        """Write the trace context into `call`, which carries it to the engine and the replicas."""
        call.trace_id = self._trace_id
        call.traceparent = self.traceparent if self._span.is_recording() else None

    def end(self, route: str, status: int, call: Call) -> None:
        span = self._span
        if not span.is_recording():
            return
        span.update_name(f"{self._method} {route}")
        span.set_attributes(
            {
                "http.route": route,
                "http.response.status_code": status,
                "attnserve.request_id": call.request_id,
                "attnserve.tokens": call.tokens,
                "attnserve.tokenization_s": call.tokenization_s,
            }
        )
        if call.model:
            span.set_attribute("gen_ai.request.model", call.model)
        if call.tenant is not None:
            span.set_attributes({"attnserve.tenant": call.tenant.name, "attnserve.key": call.key})
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR)
        span.end()


class Tracer:
    """Makes the spans of this process. Timestamps are `time.monotonic()` seconds, as everywhere in the service."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("attnserve", version("attnserve"))

    def close(self) -> None:
        """Send the remaining spans. Blocks while the collector receives them, or for a few seconds if it does not answer."""
        self._provider.shutdown()

    def request(self, method: str, path: str, headers: Mapping[str, str], started: float) -> RequestSpan:
        """Start the span of a request. The span joins its caller's trace if the headers name a trace, else it begins a new one."""
        method = method if method in _METHODS else "_OTHER"
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": "http"}
        parent = _W3C.extract(headers, Context())
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes, start_time=_Clock().ns(started))
        return RequestSpan(span, method)

    def batch(self, batch: Sequence[TracedInput], rows: Sequence[object], started: float, elapsed: float) -> None:
        """Add a computed batch to the trace of each of its requests, as the spans queue, batch and run."""
        failed: dict[TracedRequest, bool] = {}
        for item, row in zip(batch, rows, strict=True):
            for request, _ in item.waiters:
                if request.task.traceparent is not None:
                    failed[request] = failed.get(request, False) or isinstance(row, Exception)
        if not failed:
            return
        clock, now = _Clock(), time.monotonic()
        tokens, padded = sum(len(item.ids) for item in batch), max(len(item.ids) for item in batch) * len(batch)
        # The batch id is the same in the traces of all requests of the batch.
        described: dict[str, AttributeValue] = {
            "attnserve.batch.id": f"{getrandbits(64):016x}",
            "attnserve.batch.inputs": len(batch),
            "attnserve.batch.tokens": tokens,
            "attnserve.batch.padding_tokens": padded - tokens,
        }
        for request, bad in failed.items():
            self._queue(clock, request, started)
            begun = max(started, request.arrived)  # the arrival, if the request joined an input that was already being computed
            with (
                self._span(clock, "batch", _context(request.task.traceparent), begun, now, described) as span,
                self._span(clock, "run", set_span_in_context(span), begun, started + elapsed) as run,
            ):
                if bad:
                    run.set_status(StatusCode.ERROR, "an input of this request has no answer; the log says why")

    def dropped(self, item: TracedInput) -> None:
        """Add the queue span of an input that was dropped from the queue because it was cancelled or had expired."""
        clock, now = _Clock(), time.monotonic()
        for request, _ in item.waiters:
            if request.task.traceparent is not None:
                self._queue(clock, request, now, "cancelled or expired before it was computed")

    def generation(self, traceparent: str, usage: Usage, reason: str) -> None:
        """Add the spans of a decoder run that has ended. `reason` is stop, length, abort, error, or taken (moved to another engine)."""
        clock = _Clock()
        ended = usage.finished or time.monotonic()
        described: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": [reason],
            "attnserve.cached_tokens": usage.cached_tokens,
        }
        started, first = usage.started, usage.first_token
        with self._span(clock, "generate", _context(traceparent), usage.submitted, ended, described) as span:
            inside = set_span_in_context(span)
            with self._span(clock, "queue", inside, usage.submitted, ended if started is None else started):
                pass
            if started is not None:
                with self._span(clock, "prefill", inside, started, ended if first is None else first):
                    pass
            if first is not None:
                span.add_event("first token", timestamp=clock.ns(first))
                with self._span(clock, "decode", inside, first, ended):
                    pass
            if reason == "error":
                span.set_status(StatusCode.ERROR)

    def _queue(self, clock: "_Clock", request: TracedRequest, until: float, why: str | None = None) -> None:
        """Add the queue span of a request, only once. It ends when the first of the request's inputs left the queue."""
        if not request.queue_traced and until > request.arrived:
            described = {"attnserve.inputs": len(request.results)}
            with self._span(clock, "queue", _context(request.task.traceparent), request.arrived, until, described) as span:
                if why is not None:
                    span.set_status(StatusCode.ERROR, why)
        request.queue_traced = True

    @contextmanager
    def _span(
        self,
        clock: "_Clock",
        name: str,
        parent: Context,
        started: float,
        ended: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Iterator[Span]:
        """Make a span with known start and end. Child spans and events can be added inside the `with` block."""
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=clock.ns(started))
        yield span
        span.end(clock.ns(ended))


class _Clock:
    """Converts monotonic timestamps to wall-clock time, for spans that are made together."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, moment: float) -> int:
        return self._offset_ns + int(moment * 1e9)


def _context(traceparent: str | None) -> Context:
    assert traceparent is not None
    return _W3C.extract({"traceparent": traceparent}, Context())
