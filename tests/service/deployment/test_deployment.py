"""The service as a process: it starts, says why when it cannot, finishes what it accepted, and leaves nothing behind."""

import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from loadtest.common.server import free_port
from tests.service.fakes import PATIENCE_S, wait_until
from tests.service.live import LiveService, live

pytestmark = pytest.mark.live


MARK = "ATTNTEST_SERVICES"


@dataclass(frozen=True)
class Traces:
    """What services leave on this machine: run directories, and processes that have `mark` in their environment. Ray's workers overwrite
    theirs; they end with the raylet."""

    mark: str
    before: set[Path]

    def left(self) -> set[str]:
        """Return what is still there. Directories of services that others start at the same time come and go."""
        directories, deadline = run_directories() - self.before, time.monotonic() + PATIENCE_S
        while (found := {*map(str, directories), *self._processes()}) and time.monotonic() < deadline:
            time.sleep(0.1)
            directories &= run_directories()
        return found

    def _processes(self) -> set[str]:
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.add(f"{process.name()} {process.pid}")
        return found


def run_directories() -> set[Path]:
    """Those that no process has in its command."""
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    found = {folder.parent for folder in Path("/tmp").glob("attnserve-*/run")}
    return {folder for folder in found if not any(str(folder) in command for command in commands)}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """At the end of the test nothing of the services that it has started is left."""
    made = Traces(secrets.token_hex(8), run_directories())
    monkeypatch.setenv(MARK, made.mark)
    yield made
    assert made.left() == set()


def post(connection: http.client.HTTPConnection, text: str) -> tuple[int, bytes]:
    connection.request("POST", "/v1/embeddings", json.dumps({"input": text}), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_sigterm_under_load_loses_no_accepted_request(encoder_bundle: Path, traces: Traces) -> None:
    """Every request ends as a whole 200, as a 503 that says so, or before it was accepted; none is cut off, none fails otherwise."""
    with live([encoder_bundle]) as service:
        outcomes: Counter[str] = Counter()
        under_way = threading.Semaphore(0)

        def client(number: int) -> None:
            with closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)) as connection:
                talk(connection, number)

        def talk(connection: http.client.HTTPConnection, number: int) -> None:
            for round_ in range(100_000):
                try:
                    status, body = post(connection, f"one two three {number} {round_}")
                except ConnectionRefusedError:
                    outcomes["refused"] += 1
                    return
                except http.client.RemoteDisconnected:  # an idle connection closed under us: nothing of an answer was sent
                    outcomes["closed"] += 1
                    connection.close()
                    continue
                outcomes[str(status)] += 1
                under_way.release()
                if status == 200:
                    assert len(json.loads(body)["data"]) == 1
                elif status == 503:
                    assert "shutting down" in json.loads(body)["error"]["message"]
                    return

        threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            assert under_way.acquire(timeout=PATIENCE_S)
        assert service.stop() == 0
        for thread in threads:
            thread.join(PATIENCE_S)
    assert outcomes["200"] >= 200
    assert set(outcomes) <= {"200", "503", "refused", "closed"}, outcomes
    assert "could not be finished" not in service.output


class LongRequest:
    """A request of TEXTS that the service has begun, on a thread. `answers` has the number of vectors, or the status of an error."""

    def __init__(self, service: LiveService) -> None:
        self.answers: list[int] = []
        self._thread = threading.Thread(target=self._ask, args=(service.port,))
        self._thread.start()
        while "attnserve_active_requests 2.0" not in metrics(service) and self._thread.is_alive():  # the scrape itself is one
            pass

    def _ask(self, port: int) -> None:
        body = json.dumps({"input": [f"one two three {at}" for at in range(TEXTS)]})
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            self.answers.append(len(json.loads(answer.read())["data"]) if answer.status == 200 else answer.status)

    def answered(self) -> list[int]:
        self._thread.join(PATIENCE_S)
        return self.answers


TEXTS = 5_000
LARGE = ("--set", f"max_client_batch={TEXTS}", "--set", "drain_timeout_s=600")


def test_odd_surroundings_and_the_end_of_the_terminal(encoder_bundle: Path, traces: Traces, tmp_path: Path) -> None:
    """Standard streams are closed, the working directory has a folder `service`, and the terminal ends while a request is computed: all
    processes of its group get the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # if the tests run under nohup, the service would ignore it too, as it should
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise RuntimeError('not ours')")
    with live([encoder_bundle], *LARGE, folder=tmp_path, streams="<&- >&-") as service:
        request = LongRequest(service)
        assert service.stop(signal.SIGHUP, group=True) == 0
        assert request.answered() == [TEXTS]
        assert "did not end in order" not in service.output


def test_a_replica_that_dies_during_the_start_is_replaced(encoder_bundle: Path, traces: Traces) -> None:
    service = LiveService([encoder_bundle])
    service.wait_for("replica started")
    next(process for process in service.family() if process.name().startswith("ray::ServeReplica")).kill()
    service.wait_for("ready at")
    assert service.output.count("replica started") == 2
    assert service.stop(signal.SIGINT, group=True) == 0
    assert "Traceback" not in service.output


def test_nobody_need_read_why_the_service_ends(encoder_bundle: Path, traces: Traces, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "errors")
    service = LiveService([encoder_bundle], streams=f"2>{tmp_path}/errors")
    with (tmp_path / "errors").open() as output:
        assert any("ready at" in line for line in iter(output.readline, ""))
    next(process for process in service.family() if process.name() == "raylet").kill()
    assert service.process.wait(2 * PATIENCE_S) == 1
    service.stop()


def test_second_signal_ends_at_once_and_leaves_nothing(encoder_bundle: Path, traces: Traces) -> None:
    with live([encoder_bundle], "--set", "drain_timeout_s=600") as service, ExitStack() as stack:
        family = service.family()
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        connection.sendall(b" " * 40_000)  # more than HAProxy holds back, of a request that never ends
        wait_until(lambda: "attnserve_active_requests 2.0" in metrics(service))  # the scrape itself is the other one
        service.process.send_signal(signal.SIGTERM)
        service.wait_for("stopping")
        assert service.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert alive == []


FURTHER_STEPS = [pytest.param(step, marks=pytest.mark.exhaustive) for step in ("starting Ray Serve", "starting the replica")]


@pytest.mark.parametrize("step", ["starting Ray", *FURTHER_STEPS, "loading models"])
def test_signal_during_start_takes_everything_down(encoder_bundle: Path, traces: Traces, step: str) -> None:
    service = LiveService([encoder_bundle])
    service.wait_for(step)
    assert service.stop(signal.SIGINT) in (0, 128 + signal.SIGINT), "ready in the same moment, or not"
    assert "Traceback" not in service.output


def test_a_start_whose_process_dies_ends_with_a_message(encoder_bundle: Path, traces: Traces) -> None:
    service = LiveService([encoder_bundle])
    service.wait_for("starting Ray")
    deployer = next(process for process in service.family() if "service.deployment.deployer" in process.cmdline())
    deployer.kill()
    assert service.process.wait(2 * PATIENCE_S) == 1
    assert f"the process that starts Ray has ended with status {-signal.SIGKILL}" in service.output
    service.stop()


def test_ray_starts_no_process_that_is_not_needed(service: LiveService) -> None:
    names = sorted(process.name() for process in service.family() if "python" not in process.name())
    workers = ["ray::ServeController", "ray::ServeReplica:attnserve:attnserve"]
    assert [name for name in names if name != "ray::IDLE"] == sorted(["cat", "cat", "cat", "gcs_server", "haproxy", "raylet", *workers])


def test_the_command_loads_no_ray(service: LiveService) -> None:
    """Ray takes 80 MiB, and only the start and the end need it (`service/deployment/deployer.py`)."""
    assert [mapped.path for mapped in psutil.Process(service.process.pid).memory_maps() if "/ray/" in mapped.path] == []


def test_killed_outright_its_processes_end_too(encoder_bundle: Path, traces: Traces) -> None:
    with live([encoder_bundle]) as service:
        family = service.family()
        directories = {path for process in family for path in re.findall(r"/tmp/attnserve-\w+", " ".join(process.cmdline()))}
        service.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert alive == []
    for directory in directories:  # nobody is left to remove it
        shutil.rmtree(directory)


def test_lean_serves_without_haproxy_and_starts_again_at_once(encoder_bundle: Path) -> None:
    """At the port that it has left, whose last connections the kernel still remembers; open to others it is that port alone."""
    port = free_port()
    for _ in range(2):
        with live([encoder_bundle], "--lean", "--host", "0.0.0.0", port=port) as service:
            assert "haproxy" not in {process.name() for process in service.family()}
            assert listening_outside(service) == {port}
            with closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)) as connection:
                assert post(connection, "one two three")[0] == 200
                service.stop()  # it closes the connection first, which is the end that the kernel remembers


def test_listens_on_loopback_alone(service: LiveService) -> None:
    assert listening_outside(service) == set()


def listening_outside(service: LiveService) -> set[int]:
    """Ports that are open to other machines."""
    return {
        connection.laddr.port
        for process in service.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    }


def test_who_only_hangs_keeps_nobody_else_from_an_answer(service: LiveService) -> None:
    """200 connections say nothing, and 5 clients do not read the streams that they have; slots are free again when they are gone."""
    endless = {"model": "tiny-decoder", "prompt": "a", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}
    short = {"model": "tiny-decoder", "prompt": "a", "max_tokens": 8, "ignore_eos": True}
    with ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(socket.create_connection(("127.0.0.1", service.port)))
        for _ in range(5):
            slow = crowd.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=PATIENCE_S))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            body = json.dumps(endless).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            assert slow.recv(12) == b"HTTP/1.1 200"
        with closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)) as connection:
            for number in range(20):
                assert post(connection, f"beside a crowd {number}")[0] == 200
            connection.request("POST", "/v1/completions", json.dumps(short), {"content-type": "application/json"})
            assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 8
    wait_until(lambda: re.search(r"^vllm:num_requests_running\{[^}]*tiny-decoder[^}]*\} 0.0$", metrics(service), re.MULTILINE))


def test_taken_port_stops_the_start(encoder_bundle: Path, service: LiveService) -> None:
    second = LiveService([encoder_bundle], port=service.port)
    second.process.wait(2 * PATIENCE_S)
    assert second.stop() == 1
    assert f"cannot listen on 127.0.0.1:{service.port}" in second.output
    assert "Traceback" not in second.output


def metrics(service: LiveService) -> str:
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())
