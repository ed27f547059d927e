"""The HTTP server on an open port: what is no HTTP, comes too slowly, or is not taken."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop

from service.http.connections import Connection, Server
from tests.service.fakes import PATIENCE_S, fake_app, fake_bundle, serve_in_thread, wait_until

SOON_S = 0.05  # what a test waits for


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr("service.http.connections._SWEEP_S", SOON_S)
    monkeypatch.setattr(Connection, "head_s", PATIENCE_S)
    monkeypatch.setattr(Connection, "stall_s", PATIENCE_S)
    with serve_in_thread(fake_app(fake_bundle(tmp_path / "mini"))) as url:
        yield int(url.rpartition(":")[2])


def said(port: int, content: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(content)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    "content",
    [
        b"hello\r\n\r\n",
        b"GET /caf\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"POST /embed HTTP/1.1\r\ncontent-length: many\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01",
    ],
)
def test_what_is_no_http_is_answered_in_json(port: int, content: bytes) -> None:
    status, headers, body = said(port, content)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert "not valid HTTP" in json.loads(body)["error"]["message"]


def test_an_answer_of_unknown_length_has_no_chunks_for_a_client_of_http_1_0(port: int) -> None:
    body = json.dumps({"input": ["cat", "dog"]}).encode()
    head = b"POST /v1/embeddings HTTP/%b\r\naccept: application/x-ndjson\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    status, headers, lines = said(port, head % (b"1.0", len(body)) + body)
    assert (status, "transfer-encoding" in headers, headers["connection"]) == (200, False, "close")
    assert [json.loads(line).get("index") for line in lines.splitlines()] == [0, 1, None]
    assert said(port, head % (b"1.1", len(body)) + body)[1]["transfer-encoding"] == "chunked"
    status, headers, content = said(port, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert (status, int(headers["content-length"])) == (200, len(content))


def test_half_a_head_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Connection.on_message_begin

    def begin_hastily(self: Connection) -> None:  # once a part of the head has come
        begin(self)
        self.head_s = SOON_S  # type: ignore[misc]

    monkeypatch.setattr(Connection, "on_message_begin", begin_hastily)
    status, headers, body = said(port, b"POST /embed HTTP/1.1\r\nhost: me\r\n")
    assert (status, headers["content-type"]) == (408, "application/json")
    assert "head did not come" in json.loads(body)["message"]


def test_a_head_that_does_not_end_is_refused(port: int) -> None:
    status, _, _ = said(port, b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70_000)
    assert status == 431


@pytest.mark.parametrize(("lines", "status"), [(256, 200), (257, 431)])
def test_a_head_of_many_lines_is_refused_in_json(port: int, lines: int, status: int) -> None:
    request = b"GET /health/live HTTP/1.1\r\nconnection: close\r\n" + b"x: y\r\n" * (lines - 1) + b"\r\n"
    found, headers, body = said(port, request)
    assert found == status
    if status == 431:
        assert headers["content-type"] == "application/json"
        assert "the request's head has 257 lines, and the most is 256" in json.loads(body)["message"]


def embedding(text: str, more: str = "") -> bytes:
    body = json.dumps({"input": text})
    return f"POST /v1/embeddings HTTP/1.1\r\nhost: me\r\n{more}content-length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize("more", ["", "x-other: not a plain request\r\n"])
def test_a_client_that_ends_its_side_gets_its_answer_and_one_that_closes_is_computed_for_no_longer(tmp_path: Path, more: str) -> None:
    app = fake_app(fake_bundle(tmp_path / "mini"), threads=1)
    with serve_in_thread(app) as url:
        session, engine = app.state.catalog.session("mini"), app.state.catalog.computing("mini")
        session.hold()
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, PATIENCE_S) as staying, socket.create_connection(address, PATIENCE_S) as leaving:
            staying.sendall(embedding("cat", more))
            staying.shutdown(socket.SHUT_WR)
            session.wait(lambda: len(session.batches) == 1)
            running = engine.queued_tokens
            leaving.sendall(embedding("dog", more))
            wait_until(lambda: engine.queued_tokens > running)
            leaving.close()
            wait_until(lambda: app.state.catalog.active == 1)
            session.open()
            received = staying.makefile("rb").read()
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert b'"embedding":[' in received
        assert len(session.batches) == 1, "the input of the client that left is not computed"


def test_an_idle_connection_after_an_answer_stays(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
        for _ in range(2):
            monkeypatch.setattr(Connection, "head_s", PATIENCE_S)
            assert http.get("/health/live").status_code == 200
            monkeypatch.setattr(Connection, "head_s", SOON_S)
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as other:  # for as long as a head may take
                assert other.recv(1) == b""
        assert len(http._transport._pool.connections) == 1  # type: ignore[attr-defined]


def test_an_answer_that_is_not_taken_is_dropped(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is reset while megabytes of its answers wait."""
    monkeypatch.setattr(Connection, "stall_s", SOON_S)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", port))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: me\r\n\r\n" * 200_000)


def test_connections_are_bounded_for_each_address(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 8)
    monkeypatch.setattr(Connection, "share", 0.5)
    opened = [socket.create_connection(("127.0.0.1", port), PATIENCE_S) for _ in range(4)]
    try:
        status, headers, body = said(port, b"")
        assert (status, headers["retry-after"]) == (503, "1")
        assert "accepts no more from this address" in json.loads(body)["message"]
    finally:
        for each in opened:
            each.close()


def accepted(count: int, rounds: int) -> int:
    """How many of so many waiting connections are open after some rounds of the event loop."""

    async def after_rounds() -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=count)
        server = Server(uvicorn.Config(fake_app, http=Connection, lifespan="off", log_config=None))
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        clients = [socket.create_connection(listener.getsockname(), PATIENCE_S) for _ in range(count)]
        for _ in range(rounds):
            await asyncio.sleep(0)
        there = len(server.server_state.connections)
        for client in clients:
            client.close()
        await server.shutdown([listener])
        return there

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(after_rounds())


def test_a_flood_of_connections_is_accepted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it cannot open more files than the process may have, before the connections are counted."""
    monkeypatch.setattr("service.http.connections._ACCEPTED_AT_ONCE", 4)
    assert accepted(count=100, rounds=10) < 60
