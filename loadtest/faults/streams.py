"""The kill campaign: clients stream eight requests again and again while generators are killed or stopped, or the gateway is killed. Each
stream is compared with the undisturbed answer to the same request. Clients of a killed gateway continue their streams by the ids of events.

`python -m loadtest.faults.streams --bundle DIR` prints a table, and writes every figure and every difference to a JSON file.
"""

import json
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from loadtest.common import machine, server
from loadtest.common.terminal import interruptible, progress, run, stdout
from loadtest.errors import LoadtestError
from loadtest.faults.kills import Victim, records, victim, wall
from loadtest.faults.reading import Reading, compare, difference, read
from service.terminal import command_app, console

app = command_app()

GENERATOR, GATEWAY = "ServeReplica:attnserve:generator", "ServeReplica:attnserve:gateway"
WHOLE_S = 90.0  # longest wait for the replacement of a generator
_STOPPED_S = 10.0  # twice the silence after which a gateway gives a generator up
_INSTANTS_S = (0.2, 3.0)  # a fault comes so long after the pool was whole

What = StrEnum("What", ["kill", "sigstop", "gateway"])


def requests(tokens: int) -> list[dict[str, Any]]:
    """Return eight requests of about `tokens` tokens per choice: four plain ones, and four that need more than the tokens so far to go
    on: several choices, stop strings, a grammar, penalties, log-probabilities, characters of several bytes."""
    plain: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    long_enough = {"max_tokens": tokens, "min_tokens": tokens * 3 // 4}
    lines = max(tokens // 16, 1)
    regex = rf"(    [a-z]{{3,8}}_[a-z]{{3,8}} = [0-9]{{2,6}}  # [a-z]{{3,8}}\n){{{lines},{2 * lines}}}"
    return [
        {**plain, "prompt": "def mean(values):\n", "temperature": 0.0},
        {**plain, "prompt": "import os\n", "temperature": 1.0, "seed": 11},
        {**plain, "prompt": 'class Queue:\n    """', "temperature": 0.7, "top_p": 0.9, "seed": 12},
        {**plain, "prompt": "# sort a list\n" * 40, "temperature": 0.8, "top_k": 40, "seed": 13},
        {**plain, "prompt": "def first(", "n": 2, "temperature": 1.0, "seed": 14, "logprobs": 3, "frequency_penalty": 0.6},
        {**long_enough, "prompt": "def test_", "n": 2, "temperature": 0.9, "seed": 15, "stop": ["\n\n", "assert"], "presence_penalty": 0.5},
        {"max_tokens": tokens, "prompt": "def settings():\n", "n": 2, "temperature": 1.0, "seed": 16, "guided_regex": regex, "logprobs": 1},
        {
            **long_enough,
            "prompt": 'Grüße = "日本語 🙂 ',
            "n": 2,
            "temperature": 1.2,
            "seed": 17,
            "stop": ["\n", '"""'],
            "repetition_penalty": 1.2,
            "logprobs": 2,
        },
    ]


@dataclass(frozen=True)
class Lost:
    """One loss of a stream's generator or gateway, in seconds. `pause_s` lies between two chunks of the client. The others are parts of it,
    if a generator was lost: until the gateway knows of the loss, until another generator has queued the runs, until the client has the
    next chunk."""

    request_id: str
    at: float
    pause_s: float
    detection_s: float | None = None
    dispatch_s: float | None = None
    replay_s: float | None = None


@dataclass
class Campaign:
    """The faults and all streams, each with its verdict. `asked` has the request's number of each stream."""

    wanted: list[Reading]
    faults: list[float] = field(default_factory=list)
    asked: list[tuple[int, Reading]] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(compare(self.wanted[number], reading) for number, reading in self.asked)

    def problems(self) -> list[dict[str, Any]]:
        found = []
        for number, reading in self.asked:
            if (verdict := compare(self.wanted[number], reading)) != "same":
                found.append({"request": number, "id": reading.request_id, "is": verdict, "how": difference(self.wanted[number], reading)})
        return found


class Readers:
    """One thread for each request. It streams the request again and again until stopped."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], *, resumes: bool) -> None:
        self.asked: list[tuple[int, Reading]] = []
        self._port, self._resumes = port, resumes
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=each, daemon=True) for each in enumerate(bodies)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait until all streams that have begun are complete."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _read(self, number: int, body: dict[str, Any]) -> None:
        round_ = 0
        while not self._stopping.is_set():
            round_ += 1
            reading = read(self._port, body, f"stream-{number}-{round_}", resumes=self._resumes)
            self.asked.append((number, reading))
            if reading.error is not None:
                self._stopping.wait(1.0)  # a service that refuses at once is not asked in a busy loop


@contextmanager
def service(bundle: Path, generators: int = 2) -> Iterator[Victim]:
    """Start the service in profile split, with states in a temporary directory."""
    with tempfile.TemporaryDirectory() as states:
        flags = ("--generators", str(generators), "--set", "drain_timeout_s=5")
        with victim([bundle], "split", *flags, env={"ATTNSERVE_STATES": states}) as running:
            until_whole(running, generators, 0)
            yield running


def processes(running: Victim, title: str) -> list[psutil.Process]:
    """Return the processes with this title, in the order of their start."""
    found = []
    for process in running.family():
        with suppress(psutil.Error):
            if title in " ".join(process.cmdline()[:1]) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def until_whole(running: Victim, generators: int, faults: int) -> None:
    """Wait until the gateway knows that so many generators have left, and has all of them again."""

    def whole() -> bool:
        known = Counter(record["message"] for record in records(running.output(), "a replica has (come|left)"))
        come, left = known["a replica has come"], known["a replica has left"]
        return left >= faults and come - left == generators == len(processes(running, GENERATOR))

    _until(running, whole, "a generator")


def _until(running: Victim, whole: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WHOLE_S
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise LoadtestError(f"the service ended with {running.process.returncode}: {running.output()[-2000:]}")
        if whole():
            return
        time.sleep(0.2)
    raise LoadtestError(f"{what} was not replaced within {WHOLE_S:g} s: {running.output()[-2000:]}")


def strike(process: psutil.Process, what: What) -> float:
    """Kill the process, or stop it for `_STOPPED_S`; the command that watches it may kill it meanwhile. Returns the time of the fault."""
    at = time.time()
    process.send_signal(signal.SIGSTOP if what is What.sigstop else signal.SIGKILL)
    if what is What.sigstop:
        with suppress(psutil.Error):
            process.wait(_STOPPED_S)
        with suppress(psutil.Error):
            process.resume()
    return at


def losses(output: str, asked: Sequence[tuple[int, Reading]], faults: Sequence[float]) -> list[Lost]:
    """Read from the gateway's log when it noticed each loss and when the runs were queued again; measure the pauses of their streams."""
    readings = {reading.request_id: reading for _, reading in asked}
    noticed: dict[str, float] = {}
    found = []
    for record in records(output, "runs lost|runs opened again"):
        request_id, at = record["request_id"], wall(record["time"])
        if record["message"] == "runs lost":
            noticed[request_id] = at
        elif request_id in noticed and (reading := readings.get(request_id)) is not None:
            lost_at = noticed.pop(request_id)
            fault = max((each for each in faults if each <= lost_at), default=lost_at)
            if (gap := reading.gap(at)) is not None:
                found.append(Lost(request_id, lost_at, gap[1] - gap[0], lost_at - fault, at - lost_at, gap[1] - at))
    return found


def cut(asked: Sequence[tuple[int, Reading]], faults: Sequence[float]) -> list[Lost]:
    """Return the pauses of the streams whose clients had to come back."""
    gaps = [(reading, fault, reading.gap(fault)) for _, reading in asked if reading.connections > 1 for fault in faults]
    return [Lost(reading.request_id, fault, gap[1] - gap[0]) for reading, fault, gap in gaps if gap is not None]


def campaign(running: Victim, kills: int, what: What, seed: int, tokens: int, generators: int = 2) -> Campaign:
    """Read the undisturbed answers, then strike so many times. Raises LoadtestError if the service does not recover."""
    chance = random.Random(seed)
    bodies = requests(tokens)
    if what is What.gateway:  # without it, a stream that a busy store takes too long to note cannot be continued
        bodies = [{**body, "durability": "turn"} for body in bodies]
    with progress(kills + 2) as begin:
        begin("undisturbed answers")
        made = Campaign([read(running.port, body, f"undisturbed-{number}") for number, body in enumerate(bodies)])
        if errors := [reading.error for reading in made.wanted if reading.error]:
            raise LoadtestError(f"an undisturbed stream failed: {errors[0]}")
        readers = Readers(running.port, bodies, resumes=what is What.gateway)
        try:
            for number in range(kills):
                begin(f"{what.value} {number + 1} of {kills}")
                time.sleep(chance.uniform(*_INSTANTS_S))
                victims = processes(running, GATEWAY if what is What.gateway else GENERATOR)
                made.faults.append(strike(struck := chance.choice(victims), what))
                if what is What.gateway:
                    _until(running, partial(_answers_without, running, struck), "the gateway")
                else:
                    until_whole(running, generators, number + 1)
            begin("last streams")
        finally:
            readers.stop()
    made.asked = readers.asked
    made.lost = cut(made.asked, made.faults) if what is What.gateway else losses(running.output(), made.asked, made.faults)
    return made


def _answers_without(running: Victim, struck: psutil.Process) -> bool:
    """Whether the service is ready, with a gateway that is not this one."""
    found = processes(running, GATEWAY)
    return bool(found) and struck not in found and server.answers(f"http://127.0.0.1:{running.port}/health/ready")


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value at this share of the sorted values, interpolated, or None if there are none."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def summary(made: Campaign) -> dict[str, Any]:
    """Return the figures of the table."""
    parts = ("pause_s", "detection_s", "dispatch_s", "replay_s")
    of = {part: [value for each in made.lost if (value := getattr(each, part)) is not None] for part in parts}
    return {
        "faults": len(made.faults),
        "streams": len(made.asked),
        "hit": len({each.request_id for each in made.lost}),
        "losses": len(made.lost),
        **{name: made.verdicts[name] for name in ("same", "lost", "doubled", "different", "failed")},
        **{part: {"p50": quantile(of[part], 0.5), "p99": quantile(of[part], 0.99), "max": max(of[part], default=None)} for part in parts},
        "undisturbed_longest_gap_s": max(reading.longest_gap_s for reading in made.wanted),
    }


def show(figures: dict[str, Any], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for heading in ("", "p50 s", "p99 s", "longest s"):
        table.add_column(heading, justify="right" if heading else "left")
    for part in ("pause_s", "detection_s", "dispatch_s", "replay_s"):
        cells = ("-" if value is None else f"{value:.3f}" for value in figures[part].values())
        table.add_row(part.removesuffix("_s"), *cells)
    terminal = stdout(width=120)
    terminal.print(table)
    counts = ", ".join(f"{figures[name]} {name}" for name in ("same", "lost", "doubled", "different", "failed"))
    terminal.print(f"{figures['faults']} faults, {figures['streams']} streams, {figures['hit']} of them hit: {counts}", highlight=False)


@app.command()
def bench_streams(
    bundle: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    kills: Annotated[int, typer.Option(min=1, help="How many times a process is killed or stopped.")] = 100,
    what: Annotated[
        What,
        typer.Option(
            help="kill: a generator, by SIGKILL. sigstop: a generator, by SIGSTOP, then SIGCONT after 10 s unless the service has killed "
            "it. gateway: the gateway, by SIGKILL; clients continue their streams."
        ),
    ] = What.kill,
    seed: Annotated[int, typer.Option(help="Of the instants and of the choice of the generator.")] = 0,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a choice.")] = 600,
    out: Annotated[Path, typer.Option(help="Directory for the JSON file of this run.")] = Path("out/streams"),
) -> None:
    """Start the service with two generators, and kill its processes at random instants while eight clients stream. Exits with 1 if a
    stream was not the same as without kills."""
    about = machine.about_run()
    with interruptible(), service(bundle) as running:
        made = campaign(running, kills, what, seed, tokens)
    figures = summary(made)
    file = out / f"{about['date'].replace(':', '-')}-{what.value}.json"
    out.mkdir(parents=True, exist_ok=True)
    entries = {"figures": figures, "problems": made.problems(), "faults": made.faults, "losses": [asdict(each) for each in made.lost]}
    file.write_text(json.dumps({**about, "what": what.value, "seed": seed, "tokens": tokens, **entries}, indent=1) + "\n")
    show(figures, f"{what.value}, two generators, 8 streams, {about['cpus']} cores, {about['cpu']}, {about['date']}")
    for problem in made.problems()[:20]:
        console.print(f"[red]{problem['is']}[/red] request {problem['request']} ({problem['id']}): {problem['how']}", soft_wrap=True)
    console.print(f"everything: {file}", soft_wrap=True)
    if figures["same"] < figures["streams"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app, "bench-streams")
