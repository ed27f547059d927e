"""Clients of a service whose processes are killed and stopped, and the answers that they get."""

import http.client
import json
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import psutil

from loadtest.common.server import Server

EVERY_S = 0.1  # interval between two requests of the same probe
CLIENT_TIMEOUT_S = 60.0  # a client that waits longer counts the request as hung
WITHIN_S = 60.0
_QUIET = 10  # consecutive good answers to each probe after which the service counts as recovered

Fault = signal.Signals | Callable[[psutil.Process], object]  # a signal, or a function that harms the process


@dataclass(frozen=True)
class Probe:
    """A request that clients repeat. `right` returns whether the body of an answer with status 200 is correct."""

    name: str
    path: str
    body: bytes | None
    right: Callable[[bytes], bool]


def requests(encoder: str, decoder: str) -> list[Probe]:
    """Return the probes: an embedding, a short generated text and the liveness probe."""
    embedding = json.dumps({"model": encoder, "input": "a b c"}).encode()
    text = json.dumps({"model": decoder, "prompt": "def f", "max_tokens": 4, "ignore_eos": True}).encode()
    return [
        Probe("embedding", "/v1/embeddings", embedding, lambda body: b"embedding" in body),
        Probe("text", "/v1/completions", text, lambda body: b'"text"' in body),
        Probe("live", "/health/live", None, lambda body: body == b"live"),
    ]


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
    """The effects of one fault: the answers to clients from the fault until the service had recovered."""

    whole_s: float | None = None  # seconds from the fault until the service had recovered or ended; None: not within the time limit
    ended_with: int | None = None  # the command's exit status, if it ended
    last_words: str = ""
    answers: list[ProbeAnswer] = field(default_factory=list)
    gone: float = math.inf  # when the process had ended, on the clock of `time.monotonic`

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
        """Wait until all requests in flight are answered or have failed. A process that was stopped by a signal may not have answered some
        of them yet."""
        for thread in list(self._under_way):
            thread.join()

    def good_since(self, began: float) -> float | None:
        """Return the arrival time of the first good answer (200) after the latest bad one, or None if the service has not recovered yet.

        It has recovered when every probe has `_QUIET` good answers after the latest bad answer. Only requests sent since `began` count.
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
                method = "GET" if request.body is None else "POST"
                connection.request(method, request.path, request.body, {"content-type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
                status = str(answer.status)
                fit = request.right(body) if answer.status == 200 else answer.status == 503 and bool(answer.headers["retry-after"])
                if fit and answer.status == 503 and request.name != "live":
                    json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            status = type(error).__name__
        self.answers.append(ProbeAnswer(request.name, began, time.monotonic(), status, fit))


def hit(running: Server, clients: Clients, title: str, how: Fault, *, within_s: float = WITHIN_S, to_the_end: bool = False) -> Outcome:
    """Apply the fault `how` to the process whose title contains `title`, and return its effects.

    Waits until this process has ended and the service has recovered. With `to_the_end`, waits until the service has ended. Waits at most
    `within_s` seconds.
    """
    outcome, process, family = Outcome(), running.find(title), running.family()
    began = time.monotonic()
    if isinstance(how, signal.Signals):
        process.send_signal(how)
    else:
        how(process)
    while time.monotonic() < began + within_s:
        time.sleep(0.1)
        if running.process.poll() is not None:
            outcome.ended_with, outcome.whole_s = running.process.returncode, time.monotonic() - began
            _, alive = psutil.wait_procs(family, timeout=CLIENT_TIMEOUT_S)
            lines = [line for line in running.output.splitlines() if line.strip()]
            # Our error line may not be the last: Ray may print a dead raylet's log after it.
            own = [line for line in lines if line.startswith("error")]
            outcome.last_words = "".join([*lines, *own][-1:]) + "".join(f" LEFT {each.pid}" for each in alive)
            break
        if outcome.gone == math.inf and _has_ended(process):  # one stopped by SIGSTOP too: the service kills it before it replaces it
            outcome.gone = time.monotonic()
        if outcome.gone < math.inf and not to_the_end and (since := clients.good_since(outcome.gone)) is not None:
            clients.settle()
            if clients.good_since(outcome.gone) == since:
                outcome.whole_s = since - began
                break
    outcome.answers = [answer for answer in clients.answers if answer.ended >= began]
    return outcome


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
