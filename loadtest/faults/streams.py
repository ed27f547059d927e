"""The part `streams`: eight requests are streamed again and again while processes are killed or stopped (`striking.py`). Each stream is
compared with the undisturbed answer to the same request. A client that loses its connection sends the request again with the id of the
last event that it received, to continue its stream.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.errors import LoadtestError
from loadtest.faults.reading import Reading, compare, difference, read
from loadtest.faults.striking import FAULTS, SplitService, service
from loadtest.load.figures import percentile

VERDICTS = ("lost", "doubled", "different", "failed")
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


class Pause(NamedTuple):
    """The longest gap in seconds between two chunks of a stream during which the fault of the time `at` (`time.time()`) was caused."""

    request_id: str
    at: float
    pause_s: float


@dataclass
class Campaign:
    """The results of a campaign. `wanted` has the undisturbed answer to each request, in the order of the requests. `faults` has the time
    of each fault, `asked` each stream with the index of its request, `lost` the effects of faults on streams."""

    wanted: list[Reading]
    faults: list[float] = field(default_factory=list)
    asked: list[tuple[int, Reading]] = field(default_factory=list)
    lost: list[Pause] = field(default_factory=list)

    def problems(self) -> list[tuple[str, str]]:
        """Return the verdict on each stream that was not the same, and a description of it."""
        found: list[tuple[str, str]] = []
        for number, reading in self.asked:
            if (verdict := compare(self.wanted[number], reading)) != "same":
                how = difference(self.wanted[number], reading)
                found.append((verdict, f"{verdict}: request {number} ({reading.request_id}): {how}"))
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


def pauses(asked: Sequence[tuple[int, Reading]], faults: Sequence[float], connections: int = 1) -> list[Pause]:
    """For each stream that needed at least `connections` connections, return a pause for each fault that was caused during the stream.

    The pause is the longest gap between two chunks that ends after the fault. The gap may begin up to `_LATE_S` seconds after the fault,
    because chunks that were sent before the fault may arrive after it.
    """
    cut = [reading for _, reading in asked if reading.connections >= connections]
    begun = [(reading, fault) for reading in cut for fault in faults if reading.times and reading.times[0] < fault]
    return [Pause(reading.request_id, fault, gap_s) for reading, fault in begun if (gap_s := reading.gap_s(fault, fault + _LATE_S))]


def campaign(running: SplitService, count: int, what: str, seed: int, tokens: int) -> Campaign:
    """Read the undisturbed answers, then cause `count` faults while the requests are streamed, and return all streams and losses.

    Raises LoadtestError if an undisturbed stream fails or the service does not recover.
    """
    chance, fault = random.Random(seed), FAULTS[what]
    bodies = requests(tokens)
    # A client can continue a stream only if its run is stored. With the durability `turn`, an answer begins only when this is so.
    if fault.resumes:
        bodies = [{**body, "durability": "turn"} for body in bodies]
    port = running.port
    made = Campaign([read(port, body, f"undisturbed-{number}") for number, body in enumerate(bodies)])
    if errors := [reading.error for reading in made.wanted if reading.error]:
        raise LoadtestError(f"an undisturbed stream failed: {errors[0]}")
    readers = Readers(port, bodies, resumes=fault.resumes)
    try:
        for _ in range(count):
            time.sleep(chance.uniform(*_INSTANTS_S))
            running.until(readers.half_stream, "half of the clients stream")
            made.faults.append(fault.strike(running, chance))
            running.until(running.whole, "the service is whole again")
    finally:
        readers.stop()
    made.asked = readers.asked
    made.lost = pauses(made.asked, made.faults, connections=2 if fault.resumes else 1)
    return made


def figures_of(made: Campaign) -> Figures:
    """Return the figures of a campaign. A stream that was not the same is described in a problem's note."""
    problems = made.problems()
    counts, note = Counter(verdict for verdict, _ in problems), "; ".join(how for _, how in problems[:20])
    found: dict[str, float | Figure] = {
        "streams": float(len(made.asked)),
        "hit": float(len({each.request_id for each in made.lost})),
        "undisturbed": max(reading.gap_s() for reading in made.wanted),
        **{name: Figure(float(counts[name]), note) for name in VERDICTS},
    }
    values = [each.pause_s for each in made.lost]
    return found | {f"pause, p{n}": figure for n in (50, 99) if (figure := percentile(values, n)) is not None}


def benchmark(plan: Plan) -> Benchmark:
    """`--set what=` names the fault, `count` how many times it is repeated, `seed` the instants and the choice of the process, `tokens` the
    tokens of a choice."""
    what, (count, seed, tokens) = plan.options["what"], (int(plan.options[name]) for name in ("count", "seed", "tokens"))
    if what not in FAULTS:
        raise LoadtestError(f"what={what}: choose from {', '.join(FAULTS)}")
    plan.manifest(0, "decoder")
    start = partial(service, plan.bundles[0], redis=FAULTS[what].redis)
    side = Side(what, {what: lambda running: figures_of(campaign(running, count, what, seed, tokens))}, start)
    rows = [Row(f"streams while this is struck {count} times: {FAULTS[what].about}", "", (what, "streams"))]
    rows.append(Row("of them hit", "", (what, "hit")))
    rows += [Row(f"of them {verdict}", "", (what, verdict), bar=Bar(at_most=0)) for verdict in VERDICTS]
    rows.append(Row("longest pause of an undisturbed stream", "s", (what, "undisturbed")))
    rows += [Row(f"pause of a stream that was hit, p{n}", "s", (what, f"pause, p{n}")) for n in (50, 99)]
    return Benchmark([side], rows)
