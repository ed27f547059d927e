"""Kills and stops every process of a running service on this machine, one after another, and records the answers that clients get.

`python -m loadtest.faults.kills --bundle DIR ..` starts the service with default settings, in each profile, and prints a table.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from loadtest.common import server
from loadtest.errors import LoadtestError
from service.deployment.ports import free_port

EVERY_S = 0.1  # interval between two requests of the same probe
CLIENT_TIMEOUT_S = 60.0  # a client that waits longer counts the request as hung
START_S = 600
_QUIET = 10  # consecutive good answers to each probe after which the service counts as recovered

# Titles of the processes that are replaced after a fault. Ray's own processes are not replaced: if one ends, the command ends.
REPLACED = {
    "single": ("ServeReplica:attnserve:attnserve", "haproxy", "ServeController"),
    "lean": ("ServeReplica:attnserve:attnserve", "ServeController"),
    "split": (
        "ServeReplica:attnserve:encoder",
        "ServeReplica:attnserve:generator",
        "ServeReplica:attnserve:gateway",
        "haproxy",
        "ServeController",
    ),
}
ESSENTIAL = ("raylet", "gcs_server")
FLAGS = {"single": (), "lean": ("--lean",), "split": ("--profile", "split")}

Fault = signal.Signals | Callable[[psutil.Process], object]  # a signal, or a function that harms the process


@dataclass(frozen=True)
class Probe:
    """A request that clients repeat. `right` returns whether the body of an answer with status 200 is correct."""

    name: str
    method: str
    path: str
    body: bytes
    right: Callable[[bytes], bool]


def requests(encoder: str, decoder: str | None) -> list[Probe]:
    """Return the probes: an embedding, a short generated text if there is a decoder, and the liveness probe."""
    asked = [
        Probe(
            "embedding",
            "POST",
            "/v1/embeddings",
            json.dumps({"model": encoder, "input": "a b c"}).encode(),
            lambda body: b"embedding" in body,
        )
    ]
    if decoder:
        text = {"model": decoder, "prompt": "def f", "max_tokens": 4, "ignore_eos": True}
        asked.append(Probe("text", "POST", "/v1/completions", json.dumps(text).encode(), lambda body: b'"text"' in body))
    return [*asked, Probe("live", "GET", "/health/live", b"", lambda body: body == b"live")]


@dataclass(frozen=True)
class ProbeAnswer:
    """The answer to a probe. `status` is the HTTP status or, without an answer, the type of the error. Times are those of
    `time.monotonic`."""

    name: str
    began: float
    ended: float
    status: str
    fit: bool  # whether the answer is a complete 200, or a valid 503 (JSON, with Retry-After)


@dataclass
class Outcome:
    """The effects of one fault on a process: the answers to clients from the fault until the service had recovered."""

    process: str
    how: str
    whole_s: float | None = None  # seconds from the fault until the service had recovered or ended; None: not within the time limit
    ended_with: int | None = None  # the command's exit status, if it ended
    last_words: str = ""
    answers: list[ProbeAnswer] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)  # step of the recovery -> seconds from the fault to this step

    @property
    def statuses(self) -> Counter[str]:
        return Counter(answer.status for answer in self.answers)

    @property
    def slowest_s(self) -> float:
        return max((answer.ended - answer.began for answer in self.answers), default=0.0)


class Clients:
    """Sends every probe again each `EVERY_S` seconds, on a new connection, whether or not the previous ones are answered."""

    def __init__(self, port: int, asked: list[Probe]) -> None:
        self._port, self._asked = port, asked
        self.answers: list[ProbeAnswer] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._come, daemon=True)
        self._under_way: list[threading.Thread] = []
        self._thread.start()

    def stop(self) -> None:
        """Stop sending, and wait for requests in flight."""
        self._stopping.set()
        self._thread.join()
        self.settle()

    def settle(self) -> None:
        """Wait until all requests in flight are answered or have failed. A process that was stopped by a signal may not have
        answered some of them yet."""
        for thread in list(self._under_way):
            thread.join()

    def good_since(self, began: float) -> float | None:
        """Return the arrival time of the first good answer after the latest bad one, or None if the service has not recovered yet.

        It has recovered when every probe has `_QUIET` good answers after the latest bad answer. Only requests sent since `began` count. An
        answer is good if its status is 200.
        """
        answers = sorted((answer for answer in self.answers if answer.began >= began), key=lambda answer: answer.began)
        bad = max((answer.ended for answer in answers if answer.status != "200"), default=began)
        good = [answer for answer in answers if answer.began >= bad]
        counts = Counter(answer.name for answer in good)
        return min(answer.ended for answer in good) if all(counts[each.name] >= _QUIET for each in self._asked) else None

    def _come(self) -> None:
        while not self._stopping.wait(EVERY_S):
            self._under_way = [thread for thread in self._under_way if thread.is_alive()]
            for request in self._asked:
                thread = threading.Thread(target=self._ask, args=(request,), daemon=True)
                thread.start()
                self._under_way.append(thread)

    def _ask(self, request: Probe) -> None:
        began, fit = time.monotonic(), False
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=CLIENT_TIMEOUT_S)) as connection:
                connection.request(request.method, request.path, request.body, {"content-type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
                status = str(answer.status)
                fit = request.right(body) if answer.status == 200 else answer.status == 503 and bool(answer.headers["retry-after"])
                if fit and answer.status == 503 and request.name != "live":
                    json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            status = type(error).__name__
        self.answers.append(ProbeAnswer(request.name, began, time.monotonic(), status, fit))


class Victim:
    """A service with these bundles and flags, started as a child process. The measurement kills or stops the service's processes."""

    def __init__(self, bundles: list[Path], flags: tuple[str, ...], env: dict[str, str] | None = None, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self._read = 0  # number of bytes of the output that `new_lines` has returned
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115  closed in `stop`
        command = [sys.executable, "-m", "service.cli", "serve", "--port", str(self.port), *flags]
        command += [part for bundle in bundles for part in ("--bundle", str(bundle))]
        # The service gets its own session, so that Ctrl-C reaches only the measurement, which then shuts the service down.
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
        try:
            self._wait_until_ready()
        except BaseException:
            server.stop(self.process)
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while "ready at" not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise LoadtestError(f"the service did not start: {self.output()}")
            time.sleep(0.05)

    def output(self) -> str:
        return Path(self._log.name).read_text()

    def new_lines(self) -> list[str]:
        """Return the complete lines that were added to the output since the previous call.

        It reads only the new bytes, so that it hardly delays the clients in this process.
        """
        with Path(self._log.name).open("rb") as log:
            log.seek(self._read)
            complete, end, _ = log.read().rpartition(b"\n")
        self._read += len(complete + end)
        return complete.decode(errors="replace").splitlines()

    def family(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def find(self, title: str) -> psutil.Process:
        """Return a process of the service whose command contains `title`. Waits for it, and raises LookupError if there is none."""
        deadline = time.monotonic() + CLIENT_TIMEOUT_S
        while time.monotonic() < deadline:
            for process in self.family():
                with suppress(psutil.Error):
                    if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                        return process
            time.sleep(0.1)
        raise LookupError(f"there is no process {title}")

    def stop(self) -> int:
        try:
            server.stop(self.process)
        finally:
            self._log.close()
        return self.process.wait()


@contextmanager
def victim(bundles: list[Path], profile: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[Victim]:
    """Start a service, and stop it at the end of the `with` block."""
    running = Victim(bundles, (*FLAGS[profile], *flags), env)
    try:
        yield running
    finally:
        running.stop()


def hit(running: Victim, clients: Clients, title: str, how: Fault, *, within_s: float, to_the_end: bool = False) -> Outcome:
    """Apply the fault `how` to the process whose command contains `title`, and return its effects.

    Waits until this process has ended and the service has recovered. With `to_the_end`, waits until the service has ended. Waits at most
    `within_s` seconds.
    """
    said = len(running.output())
    outcome = Outcome(title.rpartition(":")[2], how.name if isinstance(how, signal.Signals) else how.__name__)
    process = running.find(title)
    family = running.family()
    began, on_the_wall = time.monotonic(), time.time()
    gone: float | None = None
    if isinstance(how, signal.Signals):
        process.send_signal(how)
    else:
        how(process)
    while time.monotonic() < began + within_s:
        time.sleep(0.1)
        if running.process.poll() is not None:
            outcome.ended_with = running.process.returncode
            outcome.whole_s = time.monotonic() - began
            _, alive = psutil.wait_procs(family, timeout=CLIENT_TIMEOUT_S)
            lines = [line for line in running.output().splitlines() if line.strip()]
            # Our error line may not be the last: Ray may print a dead raylet's log after it.
            own = [line for line in lines if line.startswith("error")]
            outcome.last_words = [*lines, *own][-1] if lines else ""
            outcome.last_words += "".join(f" LEFT {each.pid}" for each in alive)
            break
        if gone is None and _has_ended(process):  # a process stopped by SIGSTOP ends too: the service kills it before it replaces it
            gone = time.monotonic()
        if gone is not None and not to_the_end and (since := clients.good_since(gone)) is not None:
            clients.settle()
            if clients.good_since(gone) == since:
                outcome.whole_s = since - began
                break
    outcome.answers = [answer for answer in clients.answers if answer.ended >= began]
    outcome.steps = steps(running.output()[said:], on_the_wall)
    return outcome


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def steps(output: str, began: float) -> dict[str, float]:
    """Return the seconds from the fault (`began`) to each step of the recovery that the log `output` contains.

    The steps are: a replica ended, started, has loaded its models, has tested them, is ready.
    """
    found: dict[str, float] = {}
    for record in records(output, "replica ended|replica started|loaded|tested|ready"):
        name = " ".join(filter(None, (record["message"], record.get("model"))))
        found.setdefault(name, wall(record["time"]) - began)
    return found


def records(output: str, messages: str) -> Iterator[dict[str, Any]]:
    """Yield the log records whose message matches the regular expression `messages`."""
    for line in output.splitlines():
        if re.search(rf'"message": "({messages})"', line):
            yield json.JSONDecoder().raw_decode(line, line.index('{"time"'))[0]  # Ray's threads may add text to the line


def wall(stamp: str) -> float:
    """Convert the time of a log record (RFC 3339) to seconds since 1970, like `time.time()`."""
    return datetime.fromisoformat(stamp).timestamp()


def main(
    bundle: Annotated[list[Path], typer.Option(help="Bundles to serve.")],
    profile: Annotated[list[str], typer.Option(help="single, lean, split.")] = ["single", "lean", "split"],  # noqa: B006
    encoder: Annotated[str, typer.Option()] = "all-MiniLM-L6-v2",
    decoder: Annotated[str, typer.Option()] = "python-gated-delta",
) -> None:
    """Kill, and then stop, each process of the service in each profile, and print a row of figures for each."""
    print("| profile | process | signal | whole after | slowest answer | answers | steps |\n|---|---|---|---|---|---|---|")
    for name in profile:
        titles = REPLACED[name]
        faults = [(title, how) for title in titles for how in (signal.SIGKILL, signal.SIGSTOP)]
        with victim(bundle, name) as running:
            clients = Clients(running.port, requests(encoder, decoder))
            time.sleep(3)
            for title, how in faults:
                _show(name, hit(running, clients, title, how, within_s=60))
            clients.stop()
        for title in ESSENTIAL:
            for how in (signal.SIGKILL, signal.SIGSTOP):
                with victim(bundle, name) as running:
                    clients = Clients(running.port, requests(encoder, decoder))
                    _show(name, hit(running, clients, title, how, within_s=30, to_the_end=True))
                    clients.stop()


def _show(profile: str, outcome: Outcome) -> None:
    whole = "never" if outcome.whole_s is None else f"{outcome.whole_s:.1f} s"
    if outcome.ended_with is not None:
        whole = f"ended with {outcome.ended_with} after {whole}: {outcome.last_words}"
    answers = ", ".join(f"{count} {status}" for status, count in sorted(outcome.statuses.items()))
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.steps.items())
    unfit = sum(not answer.fit for answer in outcome.answers if answer.status in ("200", "503"))
    print(
        f"| {profile} | {outcome.process} | {outcome.how} | {whole} | {outcome.slowest_s:.1f} s | {answers}, unfit {unfit} | {steps} |",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)
