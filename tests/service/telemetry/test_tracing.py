"""Traces, through the whole application: who is whose child, what crosses in headers, and what is not there when they are off."""

import asyncio
import logging
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_trace_id

from service.app import Application, build_app
from service.catalog import Catalog
from service.settings import Settings, freeze
from service.telemetry.tracing import Tracer, TracingUnavailable
from tests.service.fakes import PATIENCE_S, Client, FakeCatalog, FakeSession, app_of, client, fake_app, fake_bundle, until
from tests.service.pool_fakes import FakeGateway

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


class Spans:
    """What was exported, by name."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = Tracer(provider)

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self.all)

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]


@asynccontextmanager
async def traced(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeSession, Spans]]:
    """An application with one fake encoder, every span of which is kept."""
    spans = Spans()
    app = fake_app(fake_bundle(tmp_path / "mini"), **settings)
    app.state.catalog.tracer = spans.tracer
    async with client(app) as http:
        yield http, app.state.catalog.session("mini"), spans


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    assert span.context
    return span.context.span_id


def trace_of(span: ReadableSpan) -> str:
    assert span.context
    return format_trace_id(span.context.trace_id)


def inside(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """The child's own times are within the parent's."""
    moments = [parent.start_time, child.start_time, child.end_time, parent.end_time]
    return moments == sorted(moment for moment in moments if moment is not None)


async def embed(http: httpx.AsyncClient, *inputs: str, **headers: str) -> httpx.Response:
    return await http.post("/v1/embeddings", json={"input": list(inputs)}, headers={k.replace("_", "-"): v for k, v in headers.items()})


# Encoders --------------------------------------------------------------------------------------------------------------------------------


async def test_a_request_is_a_span_with_its_queue_its_batch_and_the_run_in_it(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, _, spans):
        assert (await embed(http, "cat dog", "fish", x_request_id="find-me")).status_code == 200
    request, batch, run = spans.one("POST /v1/embeddings"), spans.one("batch"), spans.one("run")
    assert request.parent is None
    assert {parent_of(spans.one("queue")), parent_of(batch)} == {id_of(request)}
    assert parent_of(run) == id_of(batch)
    assert all(inside(span, request) for span in (spans.one("queue"), batch)), "in the order of the clock"
    assert dict(request.attributes or {}) | {"attnserve.tokenization_s": 0} == {
        "http.request.method": "POST",
        "url.path": "/v1/embeddings",
        "url.scheme": "http",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "gen_ai.request.model": "mini",
        "attnserve.request_id": "find-me",
        "attnserve.tokens": 7,
        "attnserve.tokenization_s": 0,
    }
    said = batch.attributes or {}
    assert (said["attnserve.batch.inputs"], said["attnserve.batch.tokens"], said["attnserve.batch.padding_tokens"]) == (2, 7, 1)


async def test_requests_that_share_a_batch_have_it_each_in_their_own_trace(tmp_path: Path) -> None:
    async with traced(tmp_path, threads=1) as (http, session, spans):
        session.hold()
        held = asyncio.create_task(embed(http, "one"))
        await session.entered(1)
        engine = app_of(http).state.catalog.computing("mini")
        running = engine.queued_tokens
        others = [asyncio.create_task(embed(http, word)) for word in ("two", "three")]
        await until(lambda: engine.queued_tokens == 3 * running)
        session.open()
        await asyncio.gather(held, *others)
    first, *shared = sorted(spans.named("batch"), key=lambda span: span.start_time or 0)
    ids = [(span.attributes or {})["attnserve.batch.id"] for span in shared]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert ids[0] != (first.attributes or {})["attnserve.batch.id"]
    assert len({trace_of(span) for span in spans.named("batch")}) == 3


async def test_a_run_that_fails_is_an_error_of_run_and_request(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, session, spans):
        session.broken = True
        assert (await embed(http, "cat")).status_code == 500
    assert spans.one("run").status.status_code == StatusCode.ERROR
    request = spans.one("POST /v1/embeddings")
    assert request.status.status_code == StatusCode.ERROR
    assert (request.attributes or {})["error.type"] == "500"


async def test_a_refused_request_is_no_error_of_ours(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, _, spans):
        assert (await embed(http, "")).status_code == 400
        assert (await http.get("/nowhere")).status_code == 404
        assert (await embed(http, "cat", x_lane="fast")).status_code == 400
    assert spans.names == ["GET unmatched", "POST /v1/embeddings", "POST unmatched"]
    assert all(span.status.status_code == StatusCode.UNSET for span in spans.all)


async def test_probes_are_not_traced(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, _, spans):
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert "traceresponse" not in (await http.get(path)).headers
    assert not spans.all


async def test_the_spans_of_a_replica_behind_a_gateway_are_of_the_same_trace(tmp_path: Path) -> None:
    gateway, replica = Spans(), Spans()
    catalog = FakeGateway(Settings(bundles=(fake_bundle(tmp_path / "mini"),), threads=1))
    catalog.tracer, catalog.behind.tracer = gateway.tracer, replica.tracer
    app = build_app(catalog)
    app.state.catalog = catalog
    async with client(app) as http:
        assert (await embed(http, "cat")).status_code == 200
    assert gateway.names == ["POST /v1/embeddings"]
    assert replica.names == ["batch", "queue", "run"]
    assert parent_of(replica.one("batch")) == id_of(gateway.one("POST /v1/embeddings"))
    assert trace_of(replica.one("run")) == trace_of(gateway.one("POST /v1/embeddings"))


# W3C headers -----------------------------------------------------------------------------------------------------------------------------


async def test_a_callers_trace_goes_on_here_and_the_answer_names_it(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, _, spans):
        answer = await embed(http, "cat", traceparent=SAMPLED, tracestate="vendor=1")
    request = spans.one("POST /v1/embeddings")
    assert request.context
    assert (trace_of(request), f"{parent_of(request):016x}") == (TRACE, PARENT)
    assert request.context.trace_state["vendor"] == "1"
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{id_of(request):016x}-01"
    assert {trace_of(span) for span in spans.all} == {TRACE}


async def test_what_the_caller_does_not_sample_costs_no_spans_but_keeps_its_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attnserve.http")
    async with traced(tmp_path, access_log=True) as (http, _, spans):
        answer = await embed(http, "cat", traceparent=UNSAMPLED)
    assert not spans.all
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-00", answer.headers["traceresponse"])
    assert [record.__dict__["trace_id"] for record in caplog.records if record.message == "request"] == [TRACE]


async def test_a_traceparent_that_is_none_begins_a_new_trace(tmp_path: Path) -> None:
    async with traced(tmp_path) as (http, _, spans):
        for bad in ("", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "é"):
            answer = await http.post("/v1/embeddings", json={"input": "cat"}, headers={"traceparent": bad.encode()})
            assert answer.status_code == 200
            assert TRACE not in answer.headers["traceresponse"], bad
    assert not any(span.parent for span in spans.named("POST /v1/embeddings"))


@pytest.fixture(scope="module")
def decoder_settings(decoder_bundle: Path) -> Settings:
    return Settings(bundles=(decoder_bundle,), threads=1)


@asynccontextmanager
async def traced_decoder(settings: Settings) -> AsyncIterator[tuple[httpx.AsyncClient, Spans]]:
    """The real engine over a tiny bundle."""
    spans = Spans()
    catalog = Catalog(settings)
    catalog.tracer = spans.tracer
    app = build_app(catalog)
    async with app.router.lifespan_context(app):
        await until(lambda: catalog.failure or any(model.engine.healthy for model in catalog.models.values()))
        assert catalog.failure is None
        async with Client(app) as http:
            yield http, spans


ASKED = {"model": "tiny-decoder", "prompt": "def f(x):", "max_tokens": 6, "ignore_eos": True, "seed": 1}


async def test_a_decoders_run_is_queue_prefill_and_decode_with_the_first_token_between(decoder_settings: Settings) -> None:
    async with traced_decoder(decoder_settings) as (http, spans):
        answer = await http.post("/v1/completions", json={**ASKED, "stream": True}, headers={"traceparent": SAMPLED})
        assert answer.status_code == 200, answer.text
        await until(lambda: spans.named("generate"))
    request, generate = spans.one("POST /v1/completions"), spans.one("generate")
    assert trace_of(generate) == TRACE
    assert parent_of(generate) == id_of(request)
    parts = [spans.one(name) for name in ("queue", "prefill", "decode")]
    assert all(parent_of(part) == id_of(generate) and inside(part, generate) for part in parts)
    assert [part.start_time for part in parts[1:]] == [part.end_time for part in parts[:-1]], "one ends where the next begins"
    (event,) = generate.events
    assert (event.name, event.timestamp) == ("first token", parts[2].start_time)
    said = generate.attributes or {}
    assert said["gen_ai.usage.input_tokens"] == len(ASKED["prompt"])  # type: ignore[arg-type]  # of bytes
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (6, ("length",))
    assert len(spans.all) == 5, "none a token"


# On and off ------------------------------------------------------------------------------------------------------------------------------


async def test_off_there_is_no_header_no_id_and_nothing_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attnserve.http")
    app = fake_app(fake_bundle(tmp_path / "mini"), access_log=True)
    async with client(app) as http:
        assert app.state.catalog.tracer is None
        answer = await embed(http, "cat", traceparent=SAMPLED)
    assert "traceresponse" not in answer.headers
    (record,) = (record for record in caplog.records if record.message == "request")
    assert "trace_id" not in record.__dict__


def test_the_application_does_not_load_the_sdk() -> None:
    code = "import sys, service.app; print('opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout.strip() == "False", done.stderr


class Collector:
    """An OTLP/HTTP collector on a free loopback port: every span it was sent, and with which service's name."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[str] = []
        self.services: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.append(self.path)
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in sent.resource_spans:
                    outer.services |= {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}
                    outer.spans += [span.name for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


async def test_with_an_endpoint_set_a_collector_gets_the_spans_at_the_latest_when_the_service_stops(tmp_path: Path) -> None:
    with collecting() as collector:
        app: Application = fake_app(fake_bundle(tmp_path / "mini"), otlp_endpoint=collector.endpoint)
        async with client(app) as http:
            await embed(http, "cat")
    assert sorted(collector.spans) == ["POST /v1/embeddings", "batch", "queue", "run"]
    assert collector.services == {"attnserve"}
    assert set(collector.paths) == {"/v1/traces"}


async def test_without_the_exporter_the_start_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    catalog = FakeCatalog(Settings(bundles=(fake_bundle(tmp_path / "mini"),), otlp_endpoint="http://collector:4318"))
    with pytest.raises(TracingUnavailable, match=r"pip install 'attnserve\[trace\]'"):
        await asyncio.to_thread(catalog.load)


def test_the_setting_is_a_url_and_reaches_the_replica() -> None:
    settings = Settings(otlp_endpoint="https://collector:4318")
    assert Settings.model_validate_json(freeze(settings)) == settings
    with pytest.raises(ValueError, match="otlp_endpoint"):
        Settings(otlp_endpoint="collector:4318")
