"""A server under measurement: a command that is started, waited for, asked over HTTP, and always stopped."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from loadtest.errors import LoadtestError
from service.deployment.ports import free_port

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 45
_SHORTCUTS = ("attnserve_cache_hits_total", "attnserve_joined_inputs_total")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server. `path` takes OpenAI's embedding requests, `model` is what they name."""

    name: str
    pid: int
    port: int
    path: str
    model: str
    start_s: float  # from the command to the first 200 of its readiness

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"

    def body(self, texts: str | Sequence[str]) -> str:
        return json.dumps({"model": self.model, "input": texts if isinstance(texts, str) else list(texts)})

    def post(self, texts: Sequence[str], timeout_s: float = 600) -> tuple[float, bytes]:
        """One request with all of them: seconds from the first byte sent to the last received, and the answer."""
        body = self.body(texts).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        connection.connect()
        try:
            started = time.perf_counter()
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            elapsed = time.perf_counter() - started
        except (OSError, HTTPException) as error:
            raise LoadtestError(f"{self.name} did not answer a request of {len(texts)} texts: {error!r}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise LoadtestError(f"{self.name} answered {response.status}: {answer[:300].decode(errors='replace')}")
        return elapsed, answer

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [entry["embedding"] for entry in json.loads(self.post(texts)[1])["data"]]

    def shortcuts(self) -> float | None:
        """Inputs that were answered without being computed, so far; None from a server that does not count them."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            return count_shortcuts(response.read().decode())


def count_shortcuts(metrics: str) -> float | None:
    """The sum of cache hits and joined inputs in Prometheus text; None when neither is there."""
    counts = [float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(_SHORTCUTS)]
    return sum(counts) if counts else None


@contextmanager
def attnserve(bundle: Path, model: str, *, lean: bool = False, flags: Sequence[str] = ()) -> Iterator[Server]:
    """The service with its default settings, whatever ATTNSERVE_* is set to, started by the command of a user."""
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "serve", "--bundle", str(bundle), "--port", str(port), *["--lean"] * lean, *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTNSERVE_")}
    with running("attnserve", command, environment, f"http://127.0.0.1:{port}/health/ready") as (process, start_s):
        yield Server(name="attnserve", pid=process.pid, port=port, path="/v1/embeddings", model=model, start_s=start_s)


@contextmanager
def running(
    name: str, command: Sequence[str], environment: dict[str, str], ready_url: str, folder: Path | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", float]]:
    """The process and the seconds it took to be ready. It is stopped however the block is left.

    It has a session of its own: Ctrl-C in the terminal reaches the benchmark, which then stops it in order.
    """
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not answers(ready_url):
                if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                    raise LoadtestError(f"{name} did not become ready ({' '.join(command)}); its last output:\n{_tail(log.fileno())}")
                time.sleep(0.02)
            yield process, time.perf_counter() - started
        finally:
            stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM; after too long, or on Ctrl-C, once more (the service then ends at once); at last SIGKILL to its group."""
    impatient = None
    with suppress(ProcessLookupError):
        for number, timeout_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            try:
                process.wait(timeout_s)
                break
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt as interrupt:
                impatient = interrupt
    if impatient:
        raise impatient


def answers(url: str) -> bool:
    """It answers 200."""
    try:
        with urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError, HTTPException):
        return False


def _tail(log: int, n_lines: int = 15) -> str:
    os.lseek(log, 0, os.SEEK_SET)
    text = os.read(log, 10_000_000).decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-n_lines:])
