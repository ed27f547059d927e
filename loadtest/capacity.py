"""Runs of `attnserve load --shape ramp` as the tables of docs/capacity.md.

python -m loadtest.capacity out/load/*-ramp/run.json --page docs/capacity.md
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from loadtest import terminal
from loadtest.errors import LoadtestError
from loadtest.load.figures import StageFigures
from loadtest.load.knee import Knee
from loadtest.load.plan import Plan
from loadtest.load.shapes import WARM_UP, Shape
from loadtest.report import amount

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_LEAST = 0.001  # cores, or core-ms a request: less is a process that only waits


@dataclass(frozen=True)
class Ramp:
    """A ramp with its knee; `about` is everything else that its file says."""

    file: Path
    about: dict[str, Any]
    plan: Plan
    steps: Sequence[StageFigures]
    knee: Knee

    @property
    def what(self) -> str:
        """The models that were asked and how."""
        kinds = ", ".join(kind if len(self.plan.mix) == 1 else f"{kind} x{share}" for kind, share in self.plan.mix.items())
        length = f", {self.plan.words} words" if self.plan.words else ""
        models = ", ".join(sorted({model for task, model in self.plan.models.items() if self._asked(task)}))
        return f"{models}: {kinds}{length}"

    def _asked(self, task: str) -> bool:
        kinds = {"embed": "embed", "documents": "embed", "rerank": "rerank", "completion": "complete", "chat": "chat"}
        return any(needed == task and any(kind.startswith(each) for kind in self.plan.mix) for each, needed in kinds.items())


def read(file: Path) -> Ramp:
    """LoadtestError when the file is no ramp, or one without a knee."""
    try:
        about = json.loads(file.read_text())
        steps = [StageFigures.model_validate(stage) for stage in about["stages"] if stage["name"] != WARM_UP]
        plan, found = Plan.model_validate(about["plan"]), about["knee"]
    except (OSError, ValueError, KeyError) as error:
        raise LoadtestError(f"{file} is no run.json of `attnserve load --shape ramp`: {error}") from error
    if not found:
        raise LoadtestError(f"{file} has no knee: already its first step was too much. Repeat the ramp with a lower --knee")
    return Ramp(file, about, plan, steps, Knee(next(step for step in steps if step.name == found["stage"]), found["reached"]))


class Part(NamedTuple):
    """A process of the service: cores it takes however little there is to do, and core-ms for each request on top."""

    name: str
    fixed_cores: float
    core_ms: float


def parts(ramp: Ramp) -> list[Part]:
    """By the line that fits cores against requests/s best, over the steps up to the knee; the dearest process first. With a single step
    all of it counts as the requests'."""
    steps = [step for step in ramp.steps if step.level <= ramp.knee.stage.level and step.cores and step.all.answered_per_s]
    rates, made = [step.all.answered_per_s for step in steps], []
    for name in ramp.knee.stage.cores:
        cores = [step.cores.get(name, 0.0) for step in steps]
        slope, fixed = np.polyfit(rates, cores, 1) if len(steps) > 1 else (cores[0] / rates[0], 0.0)
        made.append(Part(name, max(float(fixed), 0.0), max(float(slope) * 1000, 0.0)))
    return sorted((part for part in made if max(part.fixed_cores, part.core_ms) > _LEAST), key=lambda part: (-part.core_ms, part.name))


def tables(ramps: Sequence[Ramp]) -> str:
    """Markdown: the knee of each run, what a request costs as load grows, and what each process takes of it."""
    knees = [
        (
            ramp.what,
            cell(ramp.knee.rate) + ("" if ramp.knee.reached else " or more"),
            cell(ramp.knee.stage.all.tokens_per_s),
            cell(per_core(ramp.knee.rate, ramp.knee.stage)),
            cell(per_core(ramp.knee.stage.all.tokens_per_s, ramp.knee.stage)),
            cell(ramp.knee.stage.core_ms_per_request),
            cell(ramp.knee.stage.all.p50_ms),
            cell(ramp.knee.stage.all.p99_ms),
            f"{ramp.about['cpus']} x {ramp.about['cpu'].partition(' (')[0]}, {ramp.about['date'][:10]}, {ramp.about['commit'][:9]}",
        )
        for ramp in ramps
    ]
    heads = (
        "what",
        "requests/s",
        "tokens/s",
        "requests/s a busy core",
        "tokens/s a busy core",
        "core-ms a request",
        "p50 ms",
        "p99 ms",
        "where",
    )
    growth = [
        (
            ramp.what,
            *map(cell, (step.all.offered_per_s, step.all.answered_per_s, step.core_ms_per_request, step.all.p50_ms, step.all.p99_ms)),
        )
        for ramp in ramps
        for step in ramp.steps
    ]
    shares = [(ramp.what, part.name, f"{part.fixed_cores:.3f}", f"{part.core_ms:.3f}") for ramp in ramps for part in parts(ramp)]
    return "\n\n".join(
        (
            "### At the knee\n\n" + markdown(heads, knees),
            "### As load grows\n\n" + markdown(("what", "arrivals/s", "answered/s", "core-ms a request", "p50 ms", "p99 ms"), growth),
            "### By process\n\n" + markdown(("what", "process", "cores, always", "core-ms for each request on top"), shares),
        )
    )


def verdicts(runs: Iterable[Path]) -> str:
    """Markdown: the pass marks of runs of any shape, each run by the name of its folder."""
    rows = []
    for run in runs:
        about = json.loads(run.read_text())
        bounds = [f"at most {mark['at_most']:g}" if "at_most" in mark else f"at least {mark['at_least']:g}" for mark in about["marks"]]
        rows += [
            (run.parent.parent.name, f"{mark['stage']}: {mark['figure']}", cell(mark["value"]), bound, mark["verdict"], about["date"][:10])
            for mark, bound in zip(about["marks"], bounds, strict=True)
        ]
    return "### Pass marks\n\n" + markdown(("run", "mark", "figure", "bound", "", "when"), rows)


def tables_of(runs: Sequence[Path]) -> str:
    """Everything that run.json files of any shape say: ramps as tables, then the pass marks of all."""
    ramps = [read(run) for run in runs if json.loads(run.read_text())["shape"] == Shape.ramp]
    return "\n\n".join(([tables(ramps)] if ramps else []) + [verdicts(runs)])


def per_core(rate: float, stage: StageFigures) -> float | None:
    return rate / stage.service_cores if stage.service_cores else None


def cell(value: float | None) -> str:
    return "not measured" if value is None else amount(value)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def written(page: str, measured: str) -> str:
    """The page with its measured part replaced. LoadtestError when it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LoadtestError(f"the page has no lines {BEGIN} and {END} to write between")
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    runs: Annotated[list[Path], typer.Argument(help="run.json of ramps.", show_default=False)],
    page: Annotated[Path | None, typer.Option(help="Page to write the tables into; on stdout without it.")] = None,
) -> None:
    """The tables of capacity from ramps."""
    measured = tables([read(run) for run in runs])
    if page is None:
        print(measured)
    else:
        page.write_text(written(page.read_text(), measured))
        terminal.console.print(f"written: {page}")


if __name__ == "__main__":
    terminal.run(app, "python -m loadtest.capacity")
