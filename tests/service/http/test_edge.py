"""What every request meets before its route: identity, key, size, time; and what it is told when something is wrong."""

import asyncio
import gzip
import json
import logging
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.app import Application
from service.call import Call
from tests.service.fakes import PATIENCE_S, case, client, fake_app, fake_bundle, until
from tests.service.generation_fakes import FakeGenerator, generator_app

KEY, OTHER = "first-key-0123", "second-key-0123"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return fake_bundle(tmp_path / "mini")


def said(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, type and code of an error in OpenAI's form, which has these four fields and no other."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error["type"], error["code"]


def embeddings(http: httpx.AsyncClient, **options: Any) -> Any:
    return http.post("/v1/embeddings", **{"json": {"input": "cat"}, **options})


class Caller:
    """A client that speaks ASGI itself, to do what no HTTP library does: trickle, hang up, take nothing, lie about lengths."""

    def __init__(self, app: FastAPI, *, headers: dict[str, str] | None = None, path: str = "/v1/embeddings") -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.taking = asyncio.Event()
        self.taking.set()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.create_task(app(self.scope, self.incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        await self.taking.wait()

    def body(self, content: bytes, *, more: bool = False) -> None:
        self.incoming.put_nowait({"type": "http.request", "body": content, "more_body": more})

    def hang_up(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def done(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def content(self) -> Any:
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))


# Identity --------------------------------------------------------------------------------------------------------------------------------


async def test_a_requests_id_comes_back_and_is_made_where_there_is_none(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        assert (await embeddings(http, headers={"x-request-id": "my-id"})).headers["x-request-id"] == "my-id"
        made = {(await embeddings(http)).headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3
        refused = await http.post("/v1/embeddings", content=b"{", headers={"x-request-id": "my-id"})
        assert refused.headers["x-request-id"] == "my-id", "errors carry it too"


async def test_an_id_that_could_forge_a_log_line_is_replaced(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        for sent in ["x" * 129, "two words", ""]:
            with case(sent):
                assert (await embeddings(http, headers={"x-request-id": sent})).headers["x-request-id"] != sent


# Keys ------------------------------------------------------------------------------------------------------------------------------------


async def test_each_key_opens(bundle: Path) -> None:
    async with client(fake_app(bundle, api_keys=(KEY, OTHER))) as http:
        cases: list[Any] = [
            {"authorization": f"Bearer {KEY}"},
            {"authorization": f"bearer {OTHER}"},
            {"authorization": f"Bearer  {KEY} "},
            {"api-key": KEY},  # of Azure's clients
            {"x-api-key": KEY},  # of Anthropic's
            {"authorization": "Basic YTpi", "x-api-key": KEY},
            {"authorization": f"Bearer {KEY}", "api-key": "wrong-key-0123"},
        ]
        for headers in cases:
            with case(headers):
                assert (await embeddings(http, headers=headers)).status_code == 200
                refused = await embeddings(http, headers={name: value.replace("key", "kex") for name, value in headers.items()})
                assert refused.status_code == 401


async def test_probes_and_metrics_need_no_key_and_everything_else_does(bundle: Path) -> None:
    async with client(fake_app(bundle, api_keys=(KEY,))) as http:
        for path in ("/health/live", "/health/ready", "/metrics", "/docs", "/docs/docs.js", "/redoc", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/info", "/nowhere"):
            assert (await http.get(path)).status_code == 401


async def test_no_key_is_read_before_it_is_checked(bundle: Path) -> None:
    """A body of any size from a stranger is refused by its headers."""
    app = fake_app(bundle, api_keys=(KEY,))
    async with client(app):
        caller = Caller(app)
        await caller.done()
        assert caller.status == 401


# Size ------------------------------------------------------------------------------------------------------------------------------------


async def test_the_bodies_of_all_requests_together_are_bounded(bundle: Path) -> None:
    """A host's slow bodies hold its share: one more is told to come back, a small one is taken, and room is given back."""
    app = fake_app(bundle, max_body_bytes=2000, max_pending_bytes=6000)
    async with client(app) as http:
        slow = [Caller(app), Caller(app)]
        for caller in slow:
            caller.body(b" " * 1200, more=True)
        await until(lambda: app.state.catalog.body_shares.used == 2400)
        refused = await embeddings(http, json={"input": "one " * 400})
        assert said(refused) == (429, "rate_limit_error", "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (await embeddings(http)).status_code == 200
        for caller in slow:
            caller.hang_up()
            await caller.done()
        assert app.state.catalog.body_shares.used == 0


async def test_a_body_that_stops_is_answered_408_in_the_dialect_and_its_connection_closed(bundle: Path) -> None:
    app = fake_app(bundle, body_grace_s=0.05)
    async with client(app):
        for path, message in (("/v1/embeddings", lambda c: c["error"]["message"]), ("/embed", lambda c: c["error"])):
            caller = Caller(app, path=path)
            caller.body(b" " * 1000, more=True)
            await caller.done()
            assert caller.status == 408
            assert "stopped after 1000 bytes" in message(caller.content)
            assert (b"connection", b"close") in caller.sent[0]["headers"]
        assert app.state.catalog.body_shares.used == 0


async def test_bytes_that_came_fast_buy_no_time_for_later(bundle: Path) -> None:
    """Megabytes, then nothing: as little grace as after the first byte."""
    app = fake_app(bundle, body_grace_s=0.05, min_body_bytes_per_s=1)
    async with client(app):
        caller = Caller(app)
        caller.body(b" " * 2_000_000, more=True)
        await caller.done()
        assert caller.status == 408


async def test_of_too_many_bodies_on_their_way_the_one_that_waited_longest_gives_way(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.overload.uploads.MOST_UPLOADS", 20)
    app = fake_app(bundle)
    async with client(app) as http:
        slow = [Caller(app) for _ in range(50)]
        for caller in slow:
            caller.body(b" " * 100, more=True)
        await until(lambda: all(caller.task.done() for caller in slow[:30]))
        assert {caller.status for caller in slow[:30]} == {429}
        assert (await embeddings(http)).status_code == 200
        assert len([caller for caller in slow if caller.sent]) <= 31
        for caller in slow:
            caller.hang_up()
            await caller.done()
        assert len(app.edge._uploads) == 0


async def test_a_body_over_the_limit_is_refused_by_its_header_unread(bundle: Path) -> None:
    app = fake_app(bundle, max_body_bytes=2000)
    async with client(app):
        caller = Caller(app, headers={"content-length": "2001"})
        await caller.done()
        assert caller.status == 413
        assert caller.content["error"]["code"] == "body_too_large"
        assert "2001 bytes and the limit is 2000" in caller.content["error"]["message"]


async def test_a_body_that_is_longer_than_its_header_says_is_refused_as_it_grows(bundle: Path) -> None:
    app = fake_app(bundle, max_body_bytes=2000)
    async with client(app):
        for length in (None, "5", "\u00b2", "-1", "many"):
            with case(length):
                caller = Caller(app, headers={"content-length": length} if length else {})
                for _ in range(3):
                    caller.body(b"x" * 900, more=True)
                await caller.done()
                assert caller.status == 413
                assert caller.incoming.empty(), "all it took was read, and no more"


async def test_a_body_of_too_many_values_is_refused_before_it_is_read_as_json(bundle: Path) -> None:
    app = fake_app(bundle)
    async with client(app) as http:
        answer = await http.post("/v1/embeddings", content=b'{"input":[' + b"[1]," * 1_000_001 + b"[1]]}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "1000003 lists, 1000001 values, 1 keys" in answer.json()["error"]["message"]


async def test_a_byte_order_mark_before_json_is_not_part_of_it(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        for path in ("/v1/embeddings", "/embed"):
            body = BOM_UTF8 + b'{"input": "cat", "inputs": "cat"}'
            assert (await http.post(path, content=body)).status_code == 200
            gzipped = await http.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
            assert gzipped.status_code == 200


# Time ------------------------------------------------------------------------------------------------------------------------------------


async def test_a_body_that_trickles_past_the_deadline_is_given_up(bundle: Path) -> None:
    app = fake_app(bundle)
    async with client(app):
        caller = Caller(app, headers={"x-request-timeout-ms": "20"})
        caller.body(b'{"input"', more=True)
        await caller.done()
        assert caller.status == 504
        assert caller.content["error"]["type"] == "timeout_error"
        assert app.state.catalog.active == 0


LONG = "cat " * 31_000  # only one of the threads that tokenise takes a text of this length
long_texts = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": LONG}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    ],
)


def app_of(path: str, bundle: Path) -> Application:
    """An application with a model that answers this path."""
    return generator_app(FakeGenerator("wordy")) if path.endswith("completions") else fake_app(bundle)


@long_texts
async def test_a_deadline_that_passes_while_a_text_waits_to_be_tokenised_is_504(bundle: Path, path: str, body: dict[str, Any]) -> None:
    app = app_of(path, bundle)
    begun, gate = threading.Event(), threading.Event()

    def long() -> bool:
        begun.set()
        return gate.wait(PATIENCE_S)

    async with client(app) as http:
        held = asyncio.create_task(app.state.catalog.tokenizers.run(long, size=len(LONG), client="other"))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        late = await http.post(path, json=body, headers={"x-request-timeout-ms": "50"})
        assert late.status_code == 504, late.text
        assert app.state.catalog.active == 0
        gate.set()
        assert await held, "the request ended while the long text was tokenised"


async def test_prompts_that_would_be_late_are_refused_before_they_are_tokenised() -> None:
    model = FakeGenerator("wordy")
    app, gate = generator_app(model), threading.Event()
    model.engine._decoding.prefill.price.paid(10, 1.0)  # a tenth of a second for a token
    async with client(app) as http:
        held = asyncio.create_task(app.state.catalog.tokenizers.run(partial(gate.wait, PATIENCE_S), size=len(LONG), client="other"))
        asked = {"json": {"prompt": LONG, "max_tokens": 1}, "headers": {"x-request-timeout-ms": "300000"}}
        requests = [asyncio.create_task(http.post("/v1/completions", **asked)) for _ in range(5)]
        await until(lambda: sum(request.done() for request in requests) == 4)
        refused = [request.result() for request in requests if request.done()]
        gate.set()
        assert await held
        assert sorted(answer.status_code for answer in await asyncio.gather(*requests)) == [200, 429, 429, 429, 429]
    assert all(int(answer.headers["retry-after"]) > 1 for answer in refused)


@long_texts
async def test_a_text_is_tokenised_in_the_turn_of_its_client(
    bundle: Path, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, clients = app_of(path, bundle), set[str]()
    tokenizers = app.state.catalog.tokenizers
    run = tokenizers.run

    def noted(work: Callable[[], object], *, size: int, client: str) -> Awaitable[object]:
        clients.add(client)
        waiting: Awaitable[object] = run(work, size=size, client=client)
        return waiting

    monkeypatch.setattr(tokenizers, "run", noted)
    async with client(app) as http:
        assert (await http.post(path, json=body)).status_code == 200
    assert clients == {"127.0.0.1:123"}, "httpx's address, by which the edge knows the client"


async def test_a_client_that_hangs_up_within_its_body_is_not_answered_and_nothing_runs(bundle: Path) -> None:
    """What came is a whole request by accident: without the disconnect it would be embedded."""
    app = fake_app(bundle)
    async with client(app):
        caller = Caller(app)
        caller.body(b'{"input": "cat"}', more=True)
        caller.hang_up()
        await caller.done()
        assert caller.sent == []
        assert app.state.catalog.session("mini").batches == []
        assert app.state.catalog.active == 0


# Overload --------------------------------------------------------------------------------------------------------------------------------


async def test_in_overload_a_text_is_refused_before_it_is_tokenised(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.overload.queue_bound._CALM_S", 3600.0)
    app = fake_app(bundle, threads=1, max_wait_s=0)
    async with client(app) as http:
        catalog = app.state.catalog
        session = catalog.session("mini")
        session.hold()
        held = [asyncio.create_task(embeddings(http))]
        await session.entered(1)
        held.append(asyncio.create_task(embeddings(http, json={"input": "dog"})))
        await until(lambda: catalog.computing("mini").queued_tokens > 3)
        first = await embeddings(http, json={"input": "fish"})
        assert said(first) == (429, "rate_limit_error", "overloaded")
        monkeypatch.setattr(catalog.get("mini"), "texts", None)
        refused = await embeddings(http, json={"input": "fish"})
        assert said(refused) == (429, "rate_limit_error", "overloaded")
        assert int(refused.headers["retry-after-ms"]) >= 1
        session.open()
        assert (await held[0]).status_code == 200
        assert (await held[1]).status_code == 429, "it has waited longer than it may now"


async def test_who_has_waited_too_long_to_be_read_is_refused_when_that_lasts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy says when it had the request."""
    monkeypatch.setattr("service.overload.queue_bound._CALM_S", 3600.0)
    async with client(fake_app(bundle, max_wait_s=0)) as http:
        long_ago = {"x-received-ms": str(int((time.time() - 3) * 1000))}
        assert (await embeddings(http, headers=long_ago)).status_code == 200, "for once"
        refused = await embeddings(http, headers=long_ago)
        assert said(refused) == (429, "rate_limit_error", "overloaded")
        assert int(refused.headers["retry-after"]) >= 3
        assert (await http.get("/v1/models", headers=long_ago)).status_code == 200
        assert (await embeddings(http, headers={"x-received-ms": str(int((time.time() + 60) * 1000))})).status_code == 200
        assert (await embeddings(http, headers={"x-received-ms": "yesterday"})).status_code == 200


# Errors ----------------------------------------------------------------------------------------------------------------------------------


async def test_a_body_that_is_not_the_json_asked_for_is_400(bundle: Path) -> None:
    async with client(fake_app(bundle)) as http:
        cases: list[Any] = [b"", b"{", b"\xff", b"[]", b"null", b'"cat"', b'{"input": "\\ud800"}', b"{}" * 2, b'{"input": NaN}']
        cases.append(b'{"input":' + b"[" * 100_000)
        for body in cases:
            with case(body):
                assert said(await http.post("/v1/embeddings", content=body))[:2] == (400, "invalid_request_error")


async def test_an_unexpected_exception_is_a_plain_500_and_the_log_has_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret detail")

    app = fake_app(bundle)
    async with client(app) as http:
        monkeypatch.setattr(app.state.catalog.get("mini"), "answer", fails)
        answer = await embeddings(http, headers={"x-request-id": "find-me"})
        assert said(answer) == (500, "server_error", "internal_error")
        assert "secret" not in answer.text
        record = next(record for record in caplog.records if record.exc_info)
        assert (record.exc_info or (None,))[0] is ZeroDivisionError
        assert record.__dict__["request_id"] == "find-me"


async def test_a_host_header_that_is_no_host_harms_nothing(bundle: Path) -> None:
    app = fake_app(bundle)
    async with client(app):
        caller = Caller(app, headers={"host": "["}, path="/v1/nowhere")
        caller.body(b"{}")
        await caller.done()
        assert caller.status == 404


# Start and logs --------------------------------------------------------------------------------------------------------------------------


async def test_a_start_that_fails_leaves_the_port_open_and_says_why(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"changed")
    app = fake_app(bundle)
    async with client(app) as http:
        for path in ("/v1/models", "/health/ready"):
            answer = await http.get(path)
            assert answer.status_code == 503
            assert "the service cannot start" in answer.text
        assert said(await embeddings(http))[:2] == (503, "service_unavailable_error")
        assert (await http.get("/health/live")).status_code == 200


async def test_while_loading_everything_but_life_is_503_with_retry_after(bundle: Path) -> None:
    app = fake_app(bundle, aliases={"ada": "mini"})
    transport = httpx.ASGITransport(app)  # the lifespan has not begun: nothing is loaded yet
    async with httpx.AsyncClient(transport=transport, base_url="http://attnserve") as http:
        for answer in (await embeddings(http), await http.get("/v1/models"), await http.get("/v1/models/ada")):
            assert said(answer)[0] == 503
            assert answer.headers["retry-after"] == "1"
        for path in ("/", "/health", "/ping", "/health/ready", "/v2/health/ready"):
            probe = await http.get(path)
            assert (probe.status_code, probe.headers.get_list("retry-after")) == (503, ["1"])
        assert (await http.get("/health/live")).status_code == 200


async def test_no_log_line_holds_a_text_or_a_key(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "attnserve")
    async with client(fake_app(bundle, api_keys=(KEY,), access_log=True)) as http:
        for text in ("a private text", ["a private text", ""]):
            await embeddings(http, json={"input": text}, headers={"authorization": f"Bearer {KEY}"})
    logged = "".join(str(record.__dict__) for record in caplog.records)
    assert "'path': '/v1/embeddings'" in logged
    assert "private" not in logged
    assert KEY not in logged


async def whose(bundle: Path, headers: dict[str, str], **settings: Any) -> tuple[str, str]:
    """Client and host of a request's call, as a route sees them."""
    seen: list[Call] = []
    app = fake_app(bundle, **settings)
    async with client(app):
        route = app.edge.exact["POST", "/v1/embeddings"]
        answer = route.answer

        async def note(body: bytes, call: Call, catalog: Any) -> Any:
            seen.append(call)
            return await answer(body, call, catalog)

        route.answer = note
        caller = Caller(app, headers=headers)
        caller.incoming.put_nowait({"type": "http.request", "body": b'{"input": "cat"}', "more_body": False})
        await caller.task
    return seen[0].client, seen[0].host


async def test_a_request_belongs_to_its_connection(bundle: Path) -> None:
    assert await whose(bundle, {}) == ("127.0.0.1:1", "127.0.0.1")


async def test_behind_the_proxy_a_request_belongs_to_the_connection_that_the_proxy_names(bundle: Path) -> None:
    assert await whose(bundle, {"x-connection": "10.0.0.7:4711"}) == ("10.0.0.7:4711", "10.0.0.7")
    assert await whose(bundle, {"x-connection": "fe80::1:4711"}) == ("fe80::1:4711", "fe80::1")


async def test_without_a_proxy_nobody_can_pass_for_another_connection(bundle: Path) -> None:
    assert await whose(bundle, {"x-connection": "10.0.0.7:4711"}, lean=True) == ("127.0.0.1:1", "127.0.0.1")


async def test_with_keys_a_request_belongs_to_its_key_and_the_key_is_not_in_the_name(bundle: Path) -> None:
    client_, host = await whose(bundle, {"authorization": f"Bearer {KEY}"}, api_keys=(KEY, OTHER))
    other, _ = await whose(bundle, {"authorization": f"Bearer {OTHER}"}, api_keys=(KEY, OTHER))
    assert client_ == host != other
    assert client_.startswith("key:")
    assert KEY not in client_
