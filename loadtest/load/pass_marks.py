"""Reads the pass criteria of load tests from `pass_marks.toml`, and compares the figures of a load test with them."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from loadtest.common.report import Verdict, amount
from loadtest.errors import LoadtestError
from loadtest.load import figures
from loadtest.load.figures import StageFigures
from loadtest.load.shapes import STAGES, Shape

FILE = Path(__file__).with_name("pass_marks.toml")
RUN = "run"  # the value of `stage` in a criterion for the whole load test
RUN_FIGURES = frozenset(
    {"knee_reached", "p99_over_knee", "recovery_s", "p99_over_alone", "crowd_mib", "not_flat", "not_at_rest", "unanswered"}
)
# Figures that some load tests cannot measure -> the reason and the remedy. Their criteria are then not judged, which counts as not met.
_UNSEEN = "no process of the service could be followed: run this on the service's machine, or name its first process with --pid"
NOT_SEEN = {
    "not_flat": _UNSEEN,
    "crowd_mib": _UNSEEN,
    "not_at_rest": "/metrics did not answer after the load: LOADTEST_API_KEY may be needed",
    "knee_reached": "the generator was late where the knee would be: repeat the ramp, with --workers or cores of its own",
}


class PassMark(BaseModel):
    """One pass criterion. `figure` is KIND.NAME (a kind of client, or "all", and a field of `Figures`) for a stage, and one of RUN_FIGURES
    for the whole load test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None
    why: str

    @model_validator(mode="after")
    def _one_bound(self) -> "PassMark":
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.figure} needs one of at_most and at_least")
        name = self.figure.rpartition(".")[2]
        known = RUN_FIGURES if self.stage == RUN else figures.NAMES
        if name not in known:
            raise ValueError(
                f"{name} is not a figure of a {'run' if self.stage == RUN else 'stage'}; there are: {', '.join(sorted(known))}"
            )
        return self

    @property
    def bound(self) -> str:
        return f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"

    def judge(self, figure: float | None) -> Verdict:
        """Return the verdict on a figure. A missing figure (None) fails, with two exceptions. If it is in NOT_SEEN, the load test could not
        measure it, and the verdict is `not_judged`. If it belongs to one kind of client, the verdict is `not_measured`, because the mix may
        lack this kind."""
        if figure is None and self.stage == RUN and self.figure in NOT_SEEN:
            return Verdict.not_judged
        if figure is None:
            return Verdict.failed if self.stage == RUN or self.figure.startswith(f"{figures.ALL}.") else Verdict.not_measured
        holds = figure <= self.at_most if self.at_most is not None else figure >= (self.at_least or 0)
        return Verdict.passed if holds else Verdict.failed


class Judged(NamedTuple):
    mark: PassMark
    figure: float | None
    verdict: Verdict

    @property
    def words(self) -> tuple[str, str, str, str]:
        figure = "" if self.figure is None else amount(self.figure)
        return f"{self.mark.stage}: {self.mark.figure}", figure, self.mark.bound, self.verdict.value


def load(file: Path, shape: Shape) -> list[PassMark]:
    """Return the criteria of a shape. Raises LoadtestError for any error in the file, even in another shape's criteria."""
    try:
        tables = tomllib.loads(file.read_text())
        marks = {Shape(name): [PassMark.model_validate(mark) for mark in found] for name, found in tables.items()}
    except (OSError, tomllib.TOMLDecodeError, ValidationError, ValueError) as error:
        raise LoadtestError(f"{file}: {' '.join(str(error).split())}") from error
    for each, found in marks.items():
        known = {RUN, *(name for name, _, _ in STAGES[each])}
        if wrong := [mark.stage for mark in found if mark.stage not in known]:
            raise LoadtestError(f"{file}: {each} has no stage {wrong[0]}; it has: {', '.join(sorted(known))}")
    return marks.get(shape, [])


def judge(marks: Sequence[PassMark], stages: Sequence[StageFigures], of_run: Mapping[str, float | None]) -> list[Judged]:
    """Return each criterion with its figure and verdict."""
    return [Judged(mark, figure := _figure(mark, stages, of_run), mark.judge(figure)) for mark in marks]


def _figure(mark: PassMark, stages: Sequence[StageFigures], of_run: Mapping[str, float | None]) -> float | None:
    if mark.stage == RUN:
        return of_run.get(mark.figure)
    kind, _, name = mark.figure.rpartition(".")
    found = [stage.kinds[kind] for stage in stages if stage.name == mark.stage and kind in stage.kinds]
    return getattr(found[0], name) if found else None
