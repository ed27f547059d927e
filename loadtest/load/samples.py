"""Reads and writes the files of a load test: its samples (the measurements of one request by its client) and the starts of its stages."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from loadtest.errors import LoadtestError

SAMPLES, STAGES = "samples.csv", "stages.jsonl"


class Sample(NamedTuple):
    """The measurements of one request. In open loop, a request is due at its arrival time; in closed loop, as soon as its client is free.
    `due_s` is this time (`time.time()`). Latency counts from it, so it includes the load generator's own delay."""

    kind: str
    due_s: float
    ms: float  # time from `due_s` to the answer's last byte, or until the client stopped waiting
    late_ms: float  # time from `due_s` until the request was sent: the load generator's own delay, included in `ms`
    status: int  # HTTP status; 0 without a complete answer
    tokens: int = 0  # input tokens that the model computed; for streams, tokens that it generated
    retry_after: bool = False
    first_ms: float | None = None  # streams: time to the first text
    between_ms: float | None = None  # streams: time from first to last text, divided by the tokens after the first
    longest_ms: float | None = None  # streams: longest gap between two pieces of text
    problem: str = ""  # why the request counts as failed, even if its status is 200

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300 and not self.problem

    @property
    def done_s(self) -> float:
        return self.due_s + self.ms / 1000


class StageStart(NamedTuple):
    """A stage, with its start time and its number of Locust users."""

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


def begin(folder: Path, stage: StageStart) -> None:
    with (folder / STAGES).open("a") as file:
        file.write(json.dumps(stage._asdict()) + "\n")


def read(folder: Path) -> tuple[list[Sample], list[StageStart]]:
    """Return the samples and stages of the load test in `folder`. Raises LoadtestError if it has none."""
    with (folder / SAMPLES).open(newline="") as file:
        # An empty cell has its field's default.
        samples = [_SAMPLE.validate_python({name: cell for name, cell in row.items() if cell}) for row in csv.DictReader(file)]
    begun = [StageStart(**json.loads(line)) for line in (folder / STAGES).read_text().splitlines()]
    if not samples or not begun:
        raise LoadtestError(f"no request ended: see {folder / 'locust.log'}")
    return sorted(samples, key=lambda sample: sample.due_s), begun


_SAMPLE = TypeAdapter(Sample)
