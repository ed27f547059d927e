"""Starts a server to be measured, waits until it is ready, sends it HTTP requests, and always stops it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from loadtest.errors import LoadtestError
from service.deployment.ports import free_port

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 45
SHORTCUTS = ("attnserve_cache_hits_total", "attnserve_joined_inputs_total")


@dataclass(frozen=True, kw_only=True)
class MeasuredServer:
    """A running server. `path` is its route for OpenAI's embedding requests, and `model` is the model name to send."""

    name: str
    pid: int
    port: int
    path: str
    model: str
    start_s: float  # seconds from starting its process until its readiness check is answered with 200

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return self.address + self.path

    def body(self, texts: str | Sequence[str]) -> str:
        return json.dumps({"model": self.model, "input": texts if isinstance(texts, str) else list(texts)})

    def post(self, texts: Sequence[str], timeout_s: float = 600) -> tuple[float, bytes]:
        """Send all texts in one request. Returns the seconds from first byte sent to last byte received, and the answer."""
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
        """Return the number of inputs that the server has answered from its cache or together with an equal input, or None if it does not
        count them."""
        found = metrics(self.address, SHORTCUTS)
        return sum(found.values()) if found else None


def metrics(url: str, names: Collection[str], key: str = "", timeout_s: float = 30) -> dict[str, float]:
    """Return the metrics `names` of the service at `url`, each summed over its labels. `key` is an API key. Raises OSError or HTTPException
    if the service does not answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with urlopen(Request(f"{url}/metrics", headers=headers), timeout=timeout_s) as answer:
        return summed(answer.read().decode(), names)


def summed(text: str, names: Collection[str]) -> dict[str, float]:
    """Return the metrics with these names from a Prometheus text, each summed over its labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (name := line.partition("{")[0].partition(" ")[0]) in names:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


@contextmanager
def attnserve(bundle: Path, model: str, *, lean: bool = False, flags: Sequence[str] = ()) -> Iterator[MeasuredServer]:
    """Start `attnserve serve` with `flags` and otherwise default settings: the ATTNSERVE_* environment variables are not passed on. Yield
    the running server, and stop it at the end of the `with` block."""
    port = free_port()
    command = [sys.executable, "-m", "service.cli", "serve", "--bundle", str(bundle), "--port", str(port), *["--lean"] * lean, *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATTNSERVE_")}
    with running("attnserve", command, environment, f"http://127.0.0.1:{port}/health/ready") as (process, start_s):
        yield MeasuredServer(name="attnserve", pid=process.pid, port=port, path="/v1/embeddings", model=model, start_s=start_s)


@contextmanager
def running(
    name: str, command: Sequence[str], environment: dict[str, str], ready_url: str, folder: Path | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", float]]:
    """Start a process, wait until `ready_url` is answered with 200, and yield the process with the seconds that this took. The process is
    stopped when the `with` block ends, also if an error ends it. Raises LoadtestError if the process does not become ready in time.

    The process starts in a new session (setsid), so Ctrl-C in the terminal reaches only the benchmark, which then stops the process.
    """
    with tempfile.NamedTemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not answers(ready_url):
                if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                    raise LoadtestError(f"{name} did not become ready ({' '.join(command)}); its last output:\n{tail(Path(log.name))}")
                time.sleep(0.02)
            yield process, time.perf_counter() - started
        finally:
            stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process: send SIGTERM and wait. After a timeout or on Ctrl-C, send SIGTERM again, at which the service ends at once. If the
    process still runs after a second timeout, kill its process group."""
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


def terminate(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """End a process: send SIGTERM, and SIGKILL if it still runs after `timeout_s`."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Return whether a GET request to `url` is answered with 200."""
    with suppress(OSError, HTTPException), urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


def tail(log: Path) -> str:
    """Return the last lines of a program's log."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-15:])
