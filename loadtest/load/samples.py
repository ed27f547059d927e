"""One request as the client saw it; a file of them, and of the moments at which stages began."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from loadtest.errors import LoadtestError

SAMPLES, STAGES = "samples.csv", "stages.jsonl"


class Sample(NamedTuple):
    """Times of the wall clock in seconds, durations in milliseconds. A request is due when its arrival process says so, in closed loop
    when its client is free; its latency counts from there, so that waiting for a late generator is not hidden."""

    kind: str
    due_s: float
    ms: float  # until the last byte of the answer, or until it was given up
    late_ms: float  # between due and sent: the generator's own delay, contained in `ms`
    status: int  # of HTTP; 0: no whole answer
    tokens: int = 0  # read by the model, for streams drawn
    retry_after: bool = False
    first_ms: float | None = None  # streams: until the first text
    between_ms: float | None = None  # from first to last text, over the tokens between them
    longest_ms: float | None = None  # the longest silence between two pieces of text
    problem: str = ""  # why this is no good answer, whatever its status

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300 and not self.problem

    @property
    def done_s(self) -> float:
        return self.due_s + self.ms / 1000


class Begun(NamedTuple):
    """A stage, when it began, and the users of Locust it asked for."""

    name: str
    level: float
    users: int
    begin_s: float


def write_header(folder: Path) -> None:
    (folder / SAMPLES).write_text(",".join(Sample._fields) + "\n")
    (folder / STAGES).write_text("")


def append(folder: Path, samples: Iterable[Sample]) -> None:
    with (folder / SAMPLES).open("a", newline="") as file:
        csv.writer(file).writerows(samples)


def begin(folder: Path, stage: Begun) -> None:
    with (folder / STAGES).open("a") as file:
        file.write(json.dumps(stage._asdict()) + "\n")


def read(folder: Path) -> tuple[list[Sample], list[Begun]]:
    """Everything a run has left behind. LoadtestError when that is nothing."""
    with (folder / SAMPLES).open(newline="") as file:
        samples = [_sample(row) for row in csv.DictReader(file)]
    begun = [Begun(**json.loads(line)) for line in (folder / STAGES).read_text().splitlines()]
    if not samples or not begun:
        raise LoadtestError(f"no request ended: {folder / 'locust.log'} says what Locust did")
    return sorted(samples, key=lambda sample: sample.due_s), begun


def _sample(row: Mapping[str, str]) -> Sample:
    """An empty cell is a field's default."""
    return _SAMPLE.validate_python({name: cell for name, cell in row.items() if cell})


_SAMPLE = TypeAdapter(Sample)
