"""The kill campaign: clients stream eight requests again and again while processes are killed or stopped (`striking.py`). Each stream is
compared with the undisturbed answer to the same request. A client that loses its connection sends the request again with the id of the
last event that it received, to continue its stream.

`python -m loadtest.faults.streams --bundle DIR` prints a table, and writes every figure and every difference to a JSON file.
"""

import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from loadtest.common import machine
from loadtest.common.terminal import interruptible, progress, run, stdout
from loadtest.errors import LoadtestError
from loadtest.faults.kills import records, wall
from loadtest.faults.reading import Reading, compare, difference, read
from loadtest.faults.striking import FAULTS, Service, What, service, strike, until
from service.terminal import command_app, console

app = command_app()

_INSTANTS_S = (0.2, 2.0)  # shortest and longest time between the recovery of the service and the next fault
_LATE_S = 0.5  # a chunk that was sent before a fault arrives at most this long after it


def requests(tokens: int) -> list[dict[str, Any]]:
    """Return eight requests of about `tokens` tokens per choice.

    The first four are plain. The others cannot be continued from their tokens alone: they have several choices, stop strings, a grammar,
    penalties, log-probabilities, or characters of several bytes.
    """
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
    """The effect of one fault on one stream. If the stream lost its generator, `at` is when the gateway noticed it. For other faults, `at`
    is when the fault was caused. Both are times of `time.time()`. The other fields are in seconds.

    `pause_s` is the gap between two chunks at the client. If a generator was lost, three consecutive periods are also given: `detection_s`
    from the fault until the gateway notices the loss, `dispatch_s` until another generator has queued the runs, and `replay_s` until the
    client receives the next chunk.
    """

    request_id: str
    at: float
    pause_s: float
    detection_s: float | None = None
    dispatch_s: float | None = None
    replay_s: float | None = None


@dataclass
class Campaign:
    """The results of a campaign. `wanted` has the undisturbed answer to each request, in the order of the requests. `faults` has the time
    of each fault, `asked` each stream with the index of its request, `lost` the effects of faults on streams."""

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
    """Runs one thread for each request. The thread streams its request repeatedly until `stop` is called."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], *, resumes: bool) -> None:
        self.asked: list[tuple[int, Reading]] = []
        self._port, self._resumes = port, resumes
        self._streaming = set[int]()  # the requests whose stream has begun and not ended
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=each, daemon=True) for each in enumerate(bodies)]
        for thread in self._threads:
            thread.start()

    def half_stream(self) -> bool:
        """Return whether half of the clients have received a part of a stream that has not ended."""
        return len(self._streaming) >= len(self._threads) / 2

    def stop(self) -> None:
        """Begin no more streams, and wait until those that have begun are complete."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _read(self, number: int, body: dict[str, Any]) -> None:
        round_ = 0
        while not self._stopping.is_set():
            round_ += 1
            reading = read(self._port, body, f"stream-{number}-{round_}", partial(self._begun, number), resumes=self._resumes)
            self._streaming.discard(number)
            self.asked.append((number, reading))
            if reading.error is not None:
                self._stopping.wait(1.0)  # avoids a busy loop if the service refuses at once

    def _begun(self, number: int, reading: Reading) -> None:
        self._streaming.add(number)


def losses(output: str, asked: Sequence[tuple[int, Reading]], faults: Sequence[float]) -> list[Lost]:
    """Return an entry for each time that a stream lost its generator. The gateway's log (`output`) shows when it noticed the loss and when
    the stream's runs were queued again; the stream itself shows the pause at the client."""
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


def pauses(asked: Sequence[tuple[int, Reading]], faults: Sequence[float], connections: int = 1) -> list[Lost]:
    """For each stream that needed at least `connections` connections, return a pause for each fault that was caused during the stream.

    The pause is the longest gap between two chunks that ends after the fault. The gap may begin up to `_LATE_S` seconds after the fault,
    because chunks that were sent before the fault may arrive after it.
    """
    found = []
    for reading in (reading for _, reading in asked if reading.connections >= connections):
        for fault in faults:
            gaps = [after - before for before, after in pairwise(reading.times) if after > fault and before < fault + _LATE_S]
            if gaps and reading.times[0] < fault:
                found.append(Lost(reading.request_id, fault, max(gaps)))
    return found


def campaign(running: Service, count: int, what: What, seed: int, tokens: int) -> Campaign:
    """Read the undisturbed answers, then cause `count` faults while the requests are streamed, and return all streams and losses.

    Raises LoadtestError if an undisturbed stream fails or the service does not recover.
    """
    chance, fault = random.Random(seed), FAULTS[what]
    bodies = requests(tokens)
    # A client can continue a stream only if its run is stored. With the durability `turn`, an answer begins only when this is so.
    if fault.resumes:
        bodies = [{**body, "durability": "turn"} for body in bodies]
    with progress(count + 2) as begin:
        begin("undisturbed answers")
        made = Campaign([read(running.port, body, f"undisturbed-{number}") for number, body in enumerate(bodies)])
        if errors := [reading.error for reading in made.wanted if reading.error]:
            raise LoadtestError(f"an undisturbed stream failed: {errors[0]}")
        readers = Readers(running.port, bodies, resumes=fault.resumes)
        try:
            for number in range(count):
                begin(f"{what.value} {number + 1} of {count}")
                time.sleep(chance.uniform(*_INSTANTS_S))
                until(readers.half_stream, "the traffic", running.check)
                made.faults.append(strike(running, what, chance))
            begin("last streams")
        finally:
            readers.stop()
    made.asked = readers.asked
    if fault.generators:
        made.lost = losses(running.output(), made.asked, made.faults)
    else:
        made.lost = pauses(made.asked, made.faults, connections=2 if fault.resumes else 1)
    return made


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile `share` (0 to 1) of the values, interpolated, or None if there are no values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def summary(made: Campaign) -> dict[str, Any]:
    """Return the figures that the table shows and the JSON file contains."""
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
    count: Annotated[int, typer.Option("--count", "--kills", min=1, help="How many times the fault is repeated.")] = 100,
    what: Annotated[What, typer.Option(help=". ".join(f"{what.value}: {fault.about}" for what, fault in FAULTS.items()) + ".")] = What.kill,
    seed: Annotated[int, typer.Option(help="Of the instants and of the choice of the generator.")] = 0,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a choice.")] = 600,
    out: Annotated[Path, typer.Option(help="Directory for the JSON file of this run.")] = Path("out/streams"),
) -> None:
    """Start the service with two generators, and kill its processes at random instants while eight clients stream. Exits with 1 if a
    stream was not the same as without kills."""
    about = machine.about_run()
    with interruptible(), service(bundle, redis=FAULTS[what].redis) as running:
        made = campaign(running, count, what, seed, tokens)
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
