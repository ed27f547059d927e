"""Our HAProxy: Ray's configuration with ours, in the real program."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from loadtest.common.server import free_ports
from service.app import DIALECTS
from service.deployment import haproxy
from service.deployment.front import Front, listen
from service.errors import NotReady
from service.settings import Settings
from tests.service.exposition import samples
from tests.service.fakes import PATIENCE_S

pytestmark = pytest.mark.live

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
frontend http_frontend
    bind 127.0.0.1:{port}
    use_backend gateways if {{ path_beg /v1 /models /generate }}
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found."
backend gateways
    server lost 127.0.0.1:{gateway}
    # Fallback to head node's Serve proxy when no ingress replicas are available
    server SERVE_PROXY_ACTOR-fallback-0 127.0.0.1:{gateway} check backup
"""


@contextmanager
def closing_gateway(port: int, served: list[bytes]) -> Iterator[None]:
    """It takes requests and is gone: of every connection one request is read, and then it is closed."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def take() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        served.append(_request(connection))

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _request(connection: socket.socket) -> bytes:
    """All of it: closed on what was not read, the connection would be reset, and HAProxy's client with it."""
    request = b""
    while part := connection.recv(65536):
        request += part
        head, ended, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if ended and len(body) >= (int(length[1]) if length else 0):
            break
    return request


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def client(tmp_path: Path, ports: list[int]) -> Iterator[httpx.Client]:
    """Of a cluster's HAProxy whose only gateway is at the second port."""
    with proxied(tmp_path, ports) as http:
        yield http


@contextmanager
def proxied(tmp_path: Path, ports: list[int], files: int | None = None) -> Iterator[httpx.Client]:
    """`files`: that HAProxy may have open."""
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    port, gateway = ports
    config = tmp_path / "haproxy.cfg"
    config.write_text(RAYS.format(folder=tmp_path, port=port, gateway=gateway))
    limited = ["prlimit", f"--nofile={files}"] if files else []
    command = ["setpriv", "--pdeathsig", "KILL", *limited, sys.executable, "-I", haproxy.__file__, "-db", "-f", str(config)]
    with subprocess.Popen(command) as process:
        transport = httpx.HTTPTransport(retries=8)  # of connections, until it listens
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=PATIENCE_S) as http:
                http.get("/")
                yield http
        finally:
            process.kill()


KEY = {"idempotency-key": "mine"}


@pytest.mark.parametrize(
    ("again", "method", "path", "headers", "body"),
    [
        (True, "GET", "/v1/states", {}, ""),
        (True, "POST", "/v1/embeddings", {}, "{}"),
        (True, "POST", "/models/a-model/rerank", {}, "{}"),
        (True, "POST", "/v1/chat/completions", {}, '{"state": "mine"}'),
        (False, "POST", "/v1/chat/completions", {}, '{"store_state": true}'),
        (False, "POST", "/v1/chat/completions", {"content-encoding": "gzip"}, "?"),
        (False, "POST", "/generate", KEY, '{"inputs": "a", "parameters": {"store_state": {"name": "mine"}}}'),
        (False, "POST", "/v1/states", {}, "{}"),
        (True, "POST", "/v1/states", KEY, "{}"),
        (True, "PUT", "/v1/states/blob", KEY, "?"),
        (False, "PATCH", "/v1/states/mine", {**KEY, "if-match": '"1"'}, "{}"),
        (False, "DELETE", "/v1/states/mine", {}, ""),
        (False, "DELETE", "/v1/states/rerank", {}, ""),
        (False, "PATCH", "/v1/states/generate", {"if-match": '"1"'}, "{}"),
        (False, "POST", "/v1/responses", {}, "{}"),
        (True, "POST", "/v1/responses", KEY, "{}"),
        (False, "POST", "/v1/conversations", KEY, "{}"),
        (False, "POST", "/v1/a-route-of-tomorrow", {}, "{}"),
    ],
)
def test_only_requests_that_may_be_carried_out_twice_are_sent_to_another_gateway(
    client: httpx.Client, ports: list[int], again: bool, method: str, path: str, headers: dict[str, str], body: str
) -> None:
    served: list[bytes] = []
    with closing_gateway(ports[1], served):
        answer = client.request(method, path, headers=headers, content=body)
    assert answer.status_code == 503
    assert len(served) > 1 if again else len(served) == 1


def test_errors_say_what_to_do(client: httpx.Client, ports: list[int]) -> None:
    nobody = client.get("/v1/models")
    assert (nobody.status_code, nobody.headers["retry-after"]) == (503, "1")
    assert "send it again" in nobody.json()["error"]["message"]
    with closing_gateway(ports[1], []):
        lost = client.post("/v1/embeddings", content=b"x" * 100_000)
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert "no other could be asked" in lost.json()["error"]["message"]
    for answer in (nobody, lost):  # where Cohere's clients look
        assert answer.json()["message"] == answer.json()["error"]["message"]


def test_rays_template_has_every_line_that_is_edited() -> None:
    ray = find_spec("ray")
    assert ray is not None
    template = (Path(str(ray.origin)).parent / "serve" / "_private" / "haproxy_templates.py").read_text()
    template = template.replace("{{ backend.fallback_server.name }} {{", "SERVE_PROXY_ACTOR-0 {{")
    for pattern, _ in haproxy._EVERYWHERE:
        assert re.search(pattern, template, re.MULTILINE), pattern


def test_a_cluster_keeps_its_own_clock() -> None:
    text = haproxy.edited(RAYS, connections=100)
    assert "del-header x-received-ms" in text
    assert "set-header x-received-ms" not in text
    assert "set-header x-connection %[src]:%[src_port]" in text
    assert "local0 info" in text
    assert "option http-buffer-request" in text
    assert "mode 600" in text
    assert "500.http" not in text
    assert "maxconn 100\n" in text
    assert "sc0_conn_cur gt 75" in text
    assert "text/plain" not in text
    assert "option disable-h2-upgrade" in text
    assert "tune.http.maxhdr 4096" in text


def test_a_client_that_holds_connections_leaves_room_for_others(tmp_path: Path, ports: list[int]) -> None:
    """64 at most by the files it may open, 48 for each address: half-sent requests of one keep no other out."""
    with proxied(tmp_path, ports, files=664) as http:
        port = ports[0]
        held = []
        for _ in range(100):
            with suppress(ConnectionError):  # one that is refused may be reset before `connect` returns
                held.append(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.3", 0)))
        assert len(held) >= 48
        for each in held:
            with suppress(OSError):  # those that were refused
                each.sendall(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n1234")
        assert http.get("/").status_code == 503, "of HAProxy, whose gateway is not there"
        for each in held:
            each.close()


# One machine --------------------------------------------------------------------------------------------------------------------------


class Gateway:
    """At a unix socket: it answers `answered` requests and dies with those that come after. A probe, which HAProxy may pass on to it while
    it does not know yet that it is there, is answered too, and does not count."""

    def __init__(self, place: Path, answered: int, status: bytes = b"200 OK") -> None:
        self._status = status
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen(64)
        self.left = answered
        self.served: list[bytes] = []
        self._connections: list[socket.socket] = []
        self.died = threading.Event()
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while request := connection.recv(65536):
                if not request.startswith(b"GET /health/live"):
                    self.served.append(request)
                    if not self.left:
                        self.die()
                        return
                    self.left -= 1
                connection.sendall(b"HTTP/1.1 " + self._status + b"\r\ncontent-length: 2\r\n\r\nok")

    def die(self) -> None:
        for held in (self._listener, *self._connections):
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        self.died.set()


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"gateway-{number}.sock" for number in range(2)]


@pytest.fixture
def public(tmp_path: Path, places: list[Path]) -> Iterator[httpx.Client]:
    """Of HAProxy as `attnserve serve` starts it; each request on a connection of its own."""
    settings = Settings(profile="split", gateways=2)
    with listen("127.0.0.1", 0) as listener:
        front = Front(settings, tmp_path, listener)
        front.start()
        try:
            with fresh_connections(listener) as client:
                until(client, 503)
                yield client
        finally:
            front.kill()


def fresh_connections(listener: socket.socket) -> httpx.Client:
    return httpx.Client(
        base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", limits=httpx.Limits(max_keepalive_connections=0), timeout=PATIENCE_S
    )


def until(client: httpx.Client, status: int) -> None:
    """HAProxy has looked after its gateways; it begins with the belief that they are there."""
    for _ in range(int(PATIENCE_S / 0.05)):
        if client.get("/health/live").status_code == status:
            return
        time.sleep(0.05)
    pytest.fail(f"the liveness probe did not say {status}")


def until_known(client: httpx.Client, *gateways: "Gateway") -> None:
    """HAProxy asks each of them, in turn."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(gateway.served for gateway in gateways):
        client.post("/v1/embeddings", content=b"zero")
        assert time.monotonic() < deadline, "a gateway is not asked"
    for gateway in gateways:
        gateway.served.clear()


def test_http_2_is_not_spoken(public: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", public.base_url.port or 0), PATIENCE_S) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_heads_of_many_lines_come_to_the_gateway(public: httpx.Client, places: list[Path]) -> None:
    """Which refuses them in JSON; HAProxy's own limit is 101, and its answer a page."""
    gateway = Gateway(places[0], answered=100)
    until(public, 200)
    assert public.post("/embed", headers=[("x", "y")] * 300).status_code == 200
    assert gateway.served[0].count(b"x: y\r\n") == 300


TEXT, STREAM = b'{"prompt": "a"}', b'{"prompt": "a", "stream" : true}'


@pytest.mark.parametrize(
    ("path", "body", "waits"),
    [("/v1/embeddings", b"{}", True), ("/v1/completions", STREAM, True), ("/v1/completions", TEXT, False), ("/v1/states", b"{}", False)],
)
def test_a_client_that_ends_its_side_is_answered_unless_its_request_ends_when_it_closes(
    public: httpx.Client, places: list[Path], path: str, body: bytes, waits: bool
) -> None:
    with socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(str(places[0]))
        gateway.listen(64)
        until(public, 200)
        with socket.create_connection(("127.0.0.1", public.base_url.port or 0), PATIENCE_S) as client:
            client.sendall(b"POST %b HTTP/1.1\r\nhost: me\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
            if waits:
                client.shutdown(socket.SHUT_WR)
            with _with_request(gateway) as connection:
                if waits:
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
                else:
                    client.shutdown(socket.SHUT_WR)
                    assert connection.recv(1) == b""
                    assert b"keep it open until the answer has come" in client.makefile("rb").read()


def _with_request(listener: socket.socket) -> socket.socket:
    """Return the first connection that brings a request. HAProxy also opens some to see whether the gateway is there."""
    listener.settimeout(PATIENCE_S)
    while True:
        connection, _ = listener.accept()
        connection.settimeout(PATIENCE_S)
        if connection.recv(65536):
            return connection
        connection.close()


def test_without_a_gateway_every_path_says_so_in_the_form_of_its_dialect(public: httpx.Client) -> None:
    for dialect in DIALECTS:
        for path in dialect.prefixes:
            answer = public.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            said = answer.json()
            _, form = dialect.render(NotReady(said["error"] if isinstance(said["error"], str) else said["message"]))
            for name, value in form.items():
                if isinstance(value, str):
                    assert said[name] == value, (path, name)
                else:
                    assert said[name]["message"] == value["message"], path


def test_a_gateway_that_dies_over_a_connection_in_use_costs_no_silent_end(public: httpx.Client, places: list[Path]) -> None:
    """HAProxy's own way with a connection that it had used before is to close the client's, without a word."""
    gateway = Gateway(places[0], answered=1)
    until(public, 200)
    for _ in range(int(PATIENCE_S / 0.05)):  # on a busy machine, a gateway that is there may be taken for lost once more
        if public.post("/v1/embeddings", content=b"one").text == "ok":
            break
        time.sleep(0.05)
    answer = public.post("/v1/embeddings", content=b"two")
    assert gateway.died.wait(PATIENCE_S)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert public.get("/health/live").status_code == 503


def test_a_request_goes_to_the_gateway_that_is_left(public: httpx.Client, places: list[Path]) -> None:
    doomed, other = Gateway(places[0], answered=10_000), Gateway(places[1], answered=10_000)
    until_known(public, doomed, other)
    doomed.left = 0
    for _ in range(3):
        assert public.post("/v1/embeddings", content=b"one").text == "ok"
    assert doomed.died.wait(PATIENCE_S)
    assert len(other.served) == 3
    assert all(b"x-connection: 127.0.0.1:" in request and b"x-received-ms: 1" in request for request in other.served)


def test_a_request_with_effects_goes_to_one_gateway_only(public: httpx.Client, places: list[Path]) -> None:
    """Its client gets an answer although HAProxy has used its connections to the gateways before."""
    gateways = [Gateway(place, answered=10_000) for place in places]
    until_known(public, *gateways)
    before = sum(len(gateway.served) for gateway in gateways)
    for gateway in gateways:
        gateway.left = 0
    lost = public.post("/v1/states", content=b"{}")
    assert lost.status_code == 503
    assert "Idempotency-Key" in lost.json()["error"]["message"]
    assert sum(len(gateway.served) for gateway in gateways) == before + 1


def test_while_a_gateway_loads_another_is_asked(public: httpx.Client, places: list[Path]) -> None:
    """A gateway that has just been replaced answers 503 until its models are there."""
    loading, other = Gateway(places[0], answered=10_000, status=b"503 Service Unavailable"), Gateway(places[1], answered=10_000)
    until_known(public, loading, other)
    assert [public.post("/v1/embeddings", content=b"one").status_code for _ in range(6)] == [200] * 6
    assert loading.served
    other.die()
    assert public.post("/v1/embeddings", content=b"one").status_code == 503


def test_that_a_gateway_lives_is_known_without_its_event_loop(public: httpx.Client, places: list[Path]) -> None:
    """It takes connections, as the kernel does for a process that is busy, and answers nothing."""
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(places[0]))
        busy.listen(64)
        until(public, 200)
        assert public.head("/health/live").status_code == 200


def test_it_exports_what_it_has_answered_itself(public: httpx.Client, places: list[Path]) -> None:
    """What the rule of AttnserveProxyErrors reads: 5xx of the frontend, and of servers, `nowhere` told from gateways."""
    assert public.get("/x").status_code == 503
    Gateway(places[0], answered=100)
    until(public, 200)
    assert public.post("/embed", content=b"one").status_code == 200
    exposition = public.get("/metrics/haproxy?scope=frontend&scope=server").text
    found = {(one.name, *sorted(one.labels.items())): one.value for one in samples(exposition)}

    def count(kind: str, code: str, **labels: str) -> float:
        return found[f"haproxy_{kind}_http_responses_total", *sorted({"code": code, **labels}.items())]

    assert count("frontend", "5xx", proxy="public") >= 1
    assert count("server", "5xx", proxy="gateways", server="nowhere") >= 1
    assert count("server", "2xx", proxy="gateways", server=places[0].stem) >= 1  # a probe of a busy machine may be one more
    assert count("server", "5xx", proxy="gateways", server=places[0].stem) == 0
    assert len(found) < 1500  # of three places in four backends


def test_ray_names_its_own_as_the_rule_does() -> None:
    spec = find_spec("ray")
    assert spec is not None
    private = Path(str(spec.origin)).parent / "serve" / "_private"
    template = (private / "haproxy_templates.py").read_text()
    assert "frontend http_frontend" in template
    assert "http-request use-service prometheus-exporter if { path {{ config.metrics_uri }} }" in template
    assert 'metrics_uri: str = "/metrics"' in (private / "haproxy.py").read_text()


def test_killed_it_is_started_again_and_no_connection_is_refused(tmp_path: Path, places: list[Path]) -> None:
    with listen("127.0.0.1", 0) as listener, fresh_connections(listener) as client:
        front = Front(Settings(), tmp_path, listener)
        front.start()
        try:
            until(client, 503)
            Gateway(places[0], answered=100)
            until(client, 200)
            first = front.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            answers: list[int] = []
            asking = threading.Thread(target=lambda: answers.append(client.post("/x", content=b"one").status_code))
            asking.start()
            while front.pid == first:
                front.keep()
            asking.join()
            assert answers == [200]
        finally:
            front.kill()
