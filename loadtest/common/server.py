"""The harness: starts a program, waits for what it does, watches, stops and kills its processes, and sends it HTTP requests."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import psutil

from loadtest.common import memory
from loadtest.errors import LoadtestError

START_S = 600.0  # longest wait for a program to be ready: more than the largest models need on a slow machine
STOP_S = 45.0  # wait for a program to end after SIGTERM, before it is told to end at once
WAIT_S = 90.0  # longest wait for other things, such as for a killed process to be replaced
SHORTCUTS = ("attnserve_cache_hits_total", "attnserve_joined_inputs_total")


def until(
    condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S, *, check: Callable[[], object] = lambda: None, every_s: float = 0.05
) -> Any:
    """Call `condition` until it returns a true value, and return this value. Failed connections are retried. `check` may raise an error
    that ends the wait. Raises LoadtestError after `timeout_s` seconds."""
    deadline, last = time.monotonic() + timeout_s, ""
    while True:
        try:
            if found := condition():
                return found
        except (OSError, HTTPException, json.JSONDecodeError) as error:
            last = f" ({error})"
        check()
        if time.monotonic() > deadline:
            raise LoadtestError(f"after {timeout_s:g} s this is still not true: {what}{last}")
        time.sleep(every_s)


class Program:
    """A program in a process of its own, whose output goes to a file. It runs until the end of the `with` block.

    Its process begins a session (setsid), so that Ctrl-C in the terminal reaches only the measurement, which then stops the program. If
    the thread that has started it ends in any way, also by SIGKILL of its process, the kernel kills the program.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str | None] | None = None, folder: Path | None = None, log: Path | None = None
    ) -> None:
        """`env` is added to the environment of this process; None removes a variable. `folder`: the working directory. `log`: where the
        output is kept; without it, the output is in a temporary file and then in memory."""
        self.command = list(command)
        self._env = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        self._folder, self._kept = folder, log
        self._log = log or Path(tempfile.mkdtemp(prefix="attnserve-output-"), "log")
        self._last_words = ""
        self._read = 0  # bytes of the output that `new_lines` has returned
        self.start()

    def start(self) -> None:
        """Start the program, for the first time or again. Its output is appended to that of before."""
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("a") as log:
            log.write(self._last_words)
            log.flush()
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else self._last_words

    def new_lines(self) -> list[str]:
        """Return the complete lines that were added to the output since the previous call. Only these are read, so that it hardly delays
        the clients in this process."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            complete, end, _ = log.read().rpartition(b"\n")
        self._read += len(complete + end)
        return complete.decode(errors="replace").splitlines()

    def check(self) -> None:
        """Raise LoadtestError if the program has ended."""
        if (status := self.process.poll()) is not None:
            raise LoadtestError(f"{' '.join(self.command)} ended with {status}; its last output:\n{tail(self.output)}")

    def wait_for(self, text: str) -> None:
        """Wait until the program has written `text`. Raises LoadtestError with its last output if it ends or hangs before."""

        def check() -> None:
            if text not in self.output:
                self.check()

        until(lambda: text in self.output, f"{' '.join(self.command)} writes {text!r}", START_S, check=check)

    def family(self) -> list[psutil.Process]:
        """Return the process and all its descendants, or an empty list if it has ended."""
        return memory.tree(self.process.pid)

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the running processes whose program or title contains `title`, in the order of their start."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):
                if title in " ".join(process.cmdline()[:1]) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def find(self, title: str) -> psutil.Process:
        """Return the first of `processes(title)`, when there is one."""
        found: psutil.Process = until(lambda: self.processes(title), f"there is a process {title}")[0]
        return found

    def kill(self) -> None:
        """Kill all processes at the same moment, like a power failure."""
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.process.pid).suspend()  # so that it replaces no process while they are being killed
        family = self.family()
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        psutil.wait_procs(family, WAIT_S)

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False, wait_s: float = STOP_S) -> int:
        """Send the signal, with `group` to the whole process group as a terminal does, and return the exit status.

        After `wait_s` seconds or on Ctrl-C, send SIGTERM again, at which the service ends at once. If the process still runs after that,
        kill its process group.
        """
        impatient = None
        for signalled, timeout_s in ((number, wait_s), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            if self.process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                (os.killpg if group or signalled == signal.SIGKILL else os.kill)(self.process.pid, signalled)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt as interrupt:
                impatient = interrupt
        if self._kept is None and self._log.exists():
            self._last_words = self._log.read_text(errors="replace")
            shutil.rmtree(self._log.parent)
        if impatient:
            raise impatient
        return self.process.wait()


class Server(Program):
    """A program that answers HTTP at a port of this machine. `path` is its route for OpenAI's embedding requests, and `model` the model to
    ask there. `start_s`: seconds from the start of its process until its readiness check was answered with 200."""

    def __init__(
        self, name: str, command: Sequence[str], *, port: int, ready: str = "/", path: str = "/v1/embeddings", model: str = "", **how: Any
    ) -> None:
        self.name, self.port, self.path, self.model, self._ready, self.start_s = name, port, path, model, ready, 0.0
        super().__init__(command, **how)

    def __enter__(self) -> Self:
        """Wait until the server is ready. Raises LoadtestError with its last output, and stops it, if it ends or hangs before."""
        began = time.perf_counter()
        try:
            until(self.ready, f"{self.name} is ready", START_S, check=self.check, every_s=0.02)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        return answers(self.url + self._ready)

    def body(self, texts: str | Sequence[str]) -> str:
        return json.dumps({"model": self.model, "input": texts if isinstance(texts, str) else list(texts)})

    def post(self, path: str, body: str, timeout_s: float = 600) -> tuple[float, bytes]:
        """Send a request. Returns the seconds from first byte sent to last byte received, and the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.connect()
            started = time.perf_counter()
            connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            elapsed = time.perf_counter() - started
        except (OSError, HTTPException) as error:
            raise LoadtestError(f"{self.name} did not answer {path}: {error!r}") from error
        finally:
            connection.close()
        if response.status >= 300:
            raise LoadtestError(f"{self.name} answered {path} with {response.status}: {answer[:300].decode(errors='replace')}")
        return elapsed, answer

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        return [entry["embedding"] for entry in json.loads(self.post(self.path, self.body(texts))[1])["data"]]

    def shortcuts(self) -> float:
        """Return the number of inputs that the service has answered from its cache or together with an equal input."""
        return sum(metrics(self.url, SHORTCUTS).values())


class Service(Server):
    """`attnserve serve` with these bundles and flags. `streams` has the shell's words that close or move its standard streams."""

    def __init__(self, bundles: Sequence[Path], *flags: str, port: int | None = None, streams: str = "", **how: Any) -> None:
        port = port or free_port()
        command = [sys.executable, "-P", "-m", "service.cli", "serve", "--port", str(port), *flags]
        command += [part for bundle in bundles for part in ("--bundle", str(bundle))]
        if streams:
            command = ["sh", "-c", f'exec "$@" {streams}', "sh", *command]
        super().__init__("attnserve", command, port=port, ready="/health/ready", **how)


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


def answers(url: str) -> bool:
    """Return whether a GET request to `url` is answered with 200."""
    with suppress(OSError, HTTPException), urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


def tail(output: str) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(output.strip().splitlines()[-15:])


def free_ports(count: int) -> list[int]:
    """Return `count` free ports of 127.0.0.1, below the kernel's ephemeral range, from which programs take ports while they start. Another
    program may take one before it is used; then the program that needs it ends with an error that says so.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(20_000, end))  # Ray's workers use lower ones
    random.SystemRandom().shuffle(candidates)  # not the module's `random`, which may have the same seed in several processes
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            with suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", candidates[-1]))
                ports.append(candidates[-1])
            candidates.pop()
        return ports


def free_port() -> int:
    return free_ports(1)[0]
