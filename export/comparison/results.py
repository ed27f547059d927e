"""Stores the results of each mechanism in one JSON file, saved after every step, so that an interrupted comparison can be resumed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import onnxruntime as ort
from pydantic import BaseModel

from export.comparison import mechanisms
from export.comparison.plan import ComparisonPlan

MEASURED_BY = ("child.py", "layer_graph.py", "matrices.py", "parity.py")  # a change in these files makes older figures incomparable


class Point(BaseModel):
    """The measurement at one length N, for one sequence (B = 1) on one thread."""

    N: int
    s: float  # seconds of the fastest run
    runs: int
    peak_bytes: int  # peak growth of the resident memory during the first run


class SizeParity(BaseModel):
    """The largest |onnxruntime - torch| of any output at one size, both in float32."""

    B: int
    N: int
    max_abs_error: float


class Rank(BaseModel):
    """Ranks of the effective matrix (N, N) for one head width, averaged over heads."""

    d_head: int
    numerical: float
    effective: float


class WidthPoint(BaseModel):
    """The measurement at one value of an option that the cost depends on, at the plan's `width_length`."""

    value: int
    s: float


class Result(BaseModel):
    """All results of one mechanism. `parity`, `ranks` and `layers_to_reach` are None until they are measured."""

    name: str
    key: str
    linear_weights: int = 0  # multiply-adds per token in projections
    operators: dict[str, int] = {}
    state_bytes: dict[int, int] = {}  # number of tokens -> bytes of one sequence's state; {} without a state
    points: list[Point] = []
    ended: str | None = None  # None: larger N are still to be measured; "": all are measured; else why no larger N is measured
    widths: list[WidthPoint] = []  # one for each value of the option `examples.varied`
    parity: list[SizeParity] | None = None
    ranks: list[Rank] | None = None
    layers_to_reach: int | None = None  # layers until every output depends on every token; 0: no number is enough
    reach_done: bool = False
    failure: str | None = None  # error of the last attempt; the next run tries again

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


def key(name: str, plan: ComparisonPlan) -> str:
    """Return a hash of the plan, options, runtime and source code that a result depends on. A result with a different key is measured
    again.
    """
    examples = mechanisms.EVERYTHING[name].examples
    told: dict[str, Any] = {
        "plan": plan.model_dump(mode="json"),
        "options": [dict(examples.large), dict(examples.short), examples.varied],
        "source": [mechanisms.source(name), *((Path(__file__).parent / file).read_text() for file in MEASURED_BY)],
        "onnxruntime": ort.__version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def load(folder: Path, name: str, plan: ComparisonPlan) -> Result:
    """Return the saved result, or an empty one if none is saved or its key differs."""
    wanted = key(name, plan)
    file = folder / f"{name}.json"
    if not file.is_file():
        return Result(name=name, key=wanted)
    try:
        found = Result.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError:  # not UTF-8, not JSON, or with other fields
        return Result(name=name, key=wanted)
    return found if found.key == wanted else Result(name=name, key=wanted)


def save(folder: Path, result: Result) -> None:
    """Write the file atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{result.name}.new"
    new.write_text(result.model_dump_json(indent=1))
    new.rename(folder / f"{result.name}.json")
