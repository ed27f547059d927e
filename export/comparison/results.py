"""What is kept of a mechanism: one JSON file each, written after every step, so that a comparison that was stopped goes on where it was."""

import hashlib
import json
from pathlib import Path
from typing import Any

import onnxruntime as ort
from pydantic import BaseModel

from export.comparison import mechanisms
from export.comparison.plan import Plan

MEASURED_BY = ("child.py", "layer_graph.py", "matrices.py", "parity.py")  # a change in one of these, and figures are no longer comparable


class Point(BaseModel):
    """One length, B = 1, one thread."""

    N: int
    s: float  # of the fastest run
    runs: int
    peak_bytes: int  # resident memory that a run adds to weights and input


class Parity(BaseModel):
    """onnxruntime against torch, both float32, at one size: the largest difference of a token's output."""

    B: int
    N: int
    max_abs_error: float


class Rank(BaseModel):
    """Of the effective matrix (N, N), the mean over heads."""

    d_head: int
    numerical: float
    effective: float


class WidthPoint(BaseModel):
    """One value of an option that the cost depends on, at the plan's `width_length`."""

    value: int
    s: float


class Result(BaseModel):
    """Of one mechanism. What is None or has no `stopped` yet is still to be measured."""

    name: str
    key: str
    linear_weights: int = 0  # multiply-adds a token that are projections
    operators: dict[str, int] = {}
    state_bytes: dict[int, int] = {}  # tokens so far -> bytes of one sequence's state; {} without a state
    points: list[Point] = []
    ended: str | None = None  # why no longer N is measured
    widths: list[WidthPoint] = []  # of the option that its `examples.varied` names
    parity: list[Parity] | None = None
    ranks: list[Rank] | None = None
    layers_to_reach: int | None = None  # 0: never, however many
    reach_done: bool = False
    failure: str | None = None  # what ended it the last time; it is tried again

    @property
    def complete(self) -> bool:
        varied = mechanisms.EVERYTHING[self.name].examples.varied
        return (
            self.ended is not None
            and len(self.widths) == (len(varied[1]) if varied else 0)
            and self.parity is not None
            and self.ranks is not None
            and self.reach_done
            and not self.failure
        )


def key(name: str, plan: Plan) -> str:
    """Of what a result depends on: with another plan, other options, runtime or code (the mechanism's file, how it is measured), it is
    measured again.
    """
    examples = mechanisms.EVERYTHING[name].examples
    told: dict[str, Any] = {
        "plan": plan.model_dump(mode="json"),
        "options": [dict(examples.large), dict(examples.short), examples.varied],
        "source": [mechanisms.source(name), *((Path(__file__).parent / file).read_text() for file in MEASURED_BY)],
        "onnxruntime": ort.__version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def load(folder: Path, name: str, plan: Plan) -> Result:
    """What there is of it, or an empty result."""
    wanted = key(name, plan)
    file = folder / f"{name}.json"
    if not file.is_file():
        return Result(name=name, key=wanted)
    try:
        found = Result.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError:  # no UTF-8, no JSON, or other fields
        return Result(name=name, key=wanted)
    return found if found.key == wanted else Result(name=name, key=wanted)


def save(folder: Path, result: Result) -> None:
    """In one step: a file is the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{result.name}.new"
    new.write_text(result.model_dump_json(indent=1))
    new.rename(folder / f"{result.name}.json")
