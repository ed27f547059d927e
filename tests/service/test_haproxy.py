"""Our HAProxy: Ray's configuration with ours, in the real program."""

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from service import haproxy
from service.ports import free_ports

# The lines of Ray's template that are edited, and those that a server needs.
RAYS = """global
    log 127.0.0.1:514 local0 info
    stats socket {folder}/admin.sock mode 666 level admin
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    option redispatch 1
    retry-on conn-failure empty-response
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http
frontend prometheus
    bind :{metrics}
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend gateways
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
backend gateways
    server lost 127.0.0.1:{gateway}
listen stats
  bind *:{stats}
"""


@contextmanager
def closing_gateway(port: int, served: list[bytes]) -> Iterator[None]:
    """It takes requests and is gone: every connection is read from once, and closed."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        served.append(connection.recv(65536))

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def ports() -> list[int]:
    return free_ports(4)


@pytest.fixture
def client(tmp_path: Path, ports: list[int]) -> Iterator[httpx.Client]:
    """Of an HAProxy whose only gateway is at the second port."""
    with proxied(tmp_path, ports) as http:
        yield http


@contextmanager
def proxied(tmp_path: Path, ports: list[int], files: int | None = None) -> Iterator[httpx.Client]:
    """`files`: that HAProxy may have open."""
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    port, gateway, metrics, stats = ports
    config = tmp_path / "haproxy.cfg"
    config.write_text(RAYS.format(folder=tmp_path, port=port, gateway=gateway, metrics=metrics, stats=stats))
    command = [
        *(["prlimit", f"--nofile={files}"] if files else []),
        sys.executable,
        "-I",
        haproxy.__file__,
        haproxy.ONE_MACHINE,
        "-db",
        "-f",
        str(config),
    ]
    with subprocess.Popen(command) as process:
        transport = httpx.HTTPTransport(retries=8)  # of connections, until it listens
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=30) as http:
                http.get("/")
                yield http
        finally:
            process.kill()


def test_what_a_gateway_did_not_answer_another_is_asked(client: httpx.Client, ports: list[int]) -> None:
    """Head and body may come apart; with both HAProxy can ask again, until its retries are used up."""
    served: list[bytes] = []
    with closing_gateway(ports[1], served), socket.create_connection(("127.0.0.1", ports[0]), timeout=30) as slow:
        slow.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n1234")
        slow.sendall(b"5678")
        answer = slow.recv(65536)
    assert len(served) > 1
    assert all(request.endswith(b"12345678") and b"x-received-ms" in request for request in served)
    assert answer.startswith(b"HTTP/1.1 502 ")


def test_errors_say_what_to_do(client: httpx.Client, ports: list[int]) -> None:
    nobody = client.get("/v1/models")
    assert (nobody.status_code, nobody.headers["retry-after"]) == (503, "1")
    assert "send it again" in nobody.json()["error"]["message"]
    with closing_gateway(ports[1], []):
        lost = client.post("/v1/embeddings", content=b"x" * 100_000)
    assert (lost.status_code, lost.headers["retry-after"]) == (502, "1")
    assert "no other could be asked" in lost.json()["error"]["message"]
    for answer in (nobody, lost):  # where Cohere's clients look
        assert answer.json()["message"] == answer.json()["error"]["message"]


def test_nothing_is_open_to_others(client: httpx.Client, tmp_path: Path, ports: list[int]) -> None:
    assert stat.S_IMODE(os.stat(tmp_path / "admin.sock").st_mode) == 0o600
    for port in ports[2:]:
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port)):
            pass


def test_rays_template_has_every_line_that_is_edited() -> None:
    ray = find_spec("ray")
    assert ray is not None
    template = (Path(str(ray.origin)).parent / "serve" / "_private" / "haproxy_templates.py").read_text()
    for pattern, _ in haproxy._EVERYWHERE + haproxy._ON_ONE_MACHINE:
        assert re.search(pattern, template, re.MULTILINE), pattern


def test_a_cluster_keeps_its_own_clock_and_ports() -> None:
    text = haproxy.edited(RAYS, one_machine=False, connections=100)
    assert "del-header x-received-ms" in text
    assert "set-header x-received-ms" not in text
    assert "set-header x-connection %[src]:%[src_port]" in text
    assert "bind *:{stats}" in text
    assert "local0 info" in text
    assert "option http-buffer-request" in text
    assert "mode 600" in text
    assert "500.http" not in text
    assert "maxconn 100\n" in text
    assert "sc0_conn_cur gt 75" in text
    assert "text/plain" not in text


def test_a_client_that_holds_connections_leaves_room_for_others(tmp_path: Path, ports: list[int]) -> None:
    """64 at most by the files it may open, 48 for each address: half-sent requests of one keep no other out."""
    with proxied(tmp_path, ports, files=664) as http:
        port = ports[0]
        held = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.3", 0)) for _ in range(100)]
        for each in held:
            with suppress(OSError):  # those that were refused
                each.sendall(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n1234")
        assert http.get("/").status_code == 503, "of HAProxy, whose gateway is not there"
        for each in held:
            each.close()
