"""Writes the measured part of docs/capacity.md (tables and pictures) from the results of `attnserve load`. A result, called a run in the
tables, is a file run.json, and has the name of the folder that `loadtest/capacity/campaign.py` made for it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from loadtest.common.report import amount
from loadtest.errors import LoadtestError
from loadtest.load.figures import StageFigures
from loadtest.load.knee import Knee, knee
from loadtest.load.plan import LoadPlan
from loadtest.load.shapes import WARM_UP, Shape

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_LEAST = 0.001  # the tables leave out a process that uses fewer cores at rest than this, and fewer milliseconds of a core per request
_PICTURES = {
    "embed-14": ("latency-by-rate.png", "Short texts: latency against rate, with the knee"),
    "soak": ("processes.png", "Soak: resident memory, descriptors and threads over time"),
    "overload-embed": ("percentiles.png", "Three times the knee, short texts: latency and answers over time"),
}


@dataclass(frozen=True)
class Ramp:
    """The result of a load test of the shape `ramp`, with its knee. `file` is its run.json, `about` the content of this file."""

    file: Path
    about: dict[str, Any]
    plan: LoadPlan
    steps: Sequence[StageFigures]
    knee: Knee

    @property
    def name(self) -> str:
        return name(self.file)

    @property
    def what(self) -> str:
        """The models that were requested, and the kinds and lengths of the requests."""
        kinds = ", ".join(kind if len(self.plan.mix) == 1 else f"{kind} x{share}" for kind, share in self.plan.mix.items())
        length = f", {self.plan.words} words" if self.plan.words else ""
        models = ", ".join(sorted({model for task, model in self.plan.models.items() if self._asked(task)}))
        return f"{models}: {kinds}{length}"

    def _asked(self, task: str) -> bool:
        kinds = {"embed": "embed", "documents": "embed", "rerank": "rerank", "completion": "complete", "chat": "chat"}
        return any(needed == task and any(kind.startswith(each) for kind in self.plan.mix) for each, needed in kinds.items())


def read(file: Path) -> Ramp:
    """Read the run.json of a ramp, and compute its knee again from its steps. Raises LoadtestError if the file is not the result of a ramp,
    or if the ramp has no knee."""
    try:
        about = json.loads(file.read_text())
        steps = [StageFigures.model_validate(stage) for stage in about["stages"] if stage["name"] != WARM_UP]
        plan, found = LoadPlan.model_validate(about["plan"]), knee(steps)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise LoadtestError(f"{file} is not a run.json of `attnserve load --shape ramp`: {error}") from error
    if found is None:
        raise LoadtestError(f"{file} has no knee, because its first step was already overloaded. Repeat the ramp with a lower --knee")
    return Ramp(file, about, plan, steps, found)


class ProcessCost(NamedTuple):
    """The cost of a process of the service: the cores it uses at any load, and the core-ms that each request adds."""

    name: str
    fixed_cores: float
    core_ms: float


def process_costs(ramp: Ramp) -> list[ProcessCost]:
    """Return the cost of each process, from a linear fit of the cores that it used against the requests/s, over the steps up to the knee.
    The process with the highest cost per request comes first. With a single step, the whole cost is attributed to the requests."""
    steps = [step for step in ramp.steps if step.level <= ramp.knee.stage.level and step.cores and step.all.answered_per_s]
    rates, made = [step.all.answered_per_s for step in steps], []
    for name in ramp.knee.stage.cores:
        cores = [step.cores.get(name, 0.0) for step in steps]
        slope, fixed = np.polyfit(rates, cores, 1) if len(steps) > 1 else (cores[0] / rates[0], 0.0)
        made.append(ProcessCost(name, max(float(fixed), 0.0), max(float(slope) * 1000, 0.0)))
    return sorted((part for part in made if max(part.fixed_cores, part.core_ms) > _LEAST), key=lambda part: (-part.core_ms, part.name))


# Columns of the tables: heading -> function of a ramp, or of one of its steps.
AT_THE_KNEE: dict[str, Callable[[Ramp], float | None]] = {
    "tokens/s": lambda ramp: ramp.knee.stage.all.tokens_per_s,
    "requests/s a busy core": lambda ramp: per_core(ramp.knee.rate, ramp.knee.stage),
    "tokens/s a busy core": lambda ramp: per_core(ramp.knee.stage.all.tokens_per_s, ramp.knee.stage),
    "core-ms a request": lambda ramp: ramp.knee.stage.core_ms_per_request,
    "p50 ms": lambda ramp: ramp.knee.stage.all.p50_ms,
    "p99 ms": lambda ramp: ramp.knee.stage.all.p99_ms,
    "late p99 ms": lambda ramp: ramp.knee.stage.all.late_p99_ms,
}
AS_LOAD_GROWS: dict[str, Callable[[StageFigures], float | None]] = {
    "arrivals/s": lambda step: step.all.offered_per_s,
    "answered/s": lambda step: step.all.answered_per_s,
    "core-ms a request": lambda step: step.core_ms_per_request,
    "p50 ms": lambda step: step.all.p50_ms,
    "p99 ms": lambda step: step.all.p99_ms,
    "late p99 ms": lambda step: step.all.late_p99_ms,
}


def tables(ramps: Sequence[Ramp]) -> str:
    """Return Markdown tables: the knee of each ramp, the cost of a request as the load grows, and the cost of each process."""
    knees = [
        (ramp.name, ramp.what, knee_of(ramp.knee), *(cell(figure(ramp)) for figure in AT_THE_KNEE.values()), machine_of(ramp.about))
        for ramp in ramps
    ]
    growth = [(ramp.name, *(cell(figure(step)) for figure in AS_LOAD_GROWS.values())) for ramp in ramps for step in ramp.steps]
    shares = [(ramp.name, part.name, f"{part.fixed_cores:.3f}", f"{part.core_ms:.3f}") for ramp in ramps for part in process_costs(ramp)]
    return "\n\n".join(
        (
            "### At the knee\n\n" + markdown(("run", "what", "requests/s", *AT_THE_KNEE, "where"), knees),
            "### As load grows\n\n" + markdown(("run", *AS_LOAD_GROWS), growth),
            *models(ramps),
            "### By process\n\n" + markdown(("run", "process", "cores, always", "core-ms for each request on top"), shares),
        )
    )


def machine_of(about: dict[str, Any]) -> str:
    return f"{about['cpus']} x {about['cpu'].partition(' (')[0]}, {about['date'][:10]}, {about['commit'][:9]}"


def models(ramps: Sequence[Ramp]) -> list[str]:
    """Return a Markdown table that compares the cost of different models at the knee, for ramps with the same requests. Returns [] if no
    two such ramps have different models."""
    same: dict[tuple[object, ...], list[Ramp]] = {}
    for ramp in ramps:
        same.setdefault((*ramp.plan.mix.items(), ramp.plan.words), []).append(ramp)
    rows = []
    for group in same.values():
        costs = [ramp.knee.stage.core_ms_per_request for ramp in group]
        least = min((cost for cost in costs if cost), default=None)
        if len({tuple(ramp.plan.models.items()) for ramp in group}) > 1:
            rows += [
                (ramp.name, ramp.what, knee_of(ramp.knee), cell(cost), cell(cost and least and cost / least))
                for ramp, cost in zip(group, costs, strict=True)
            ]
    heads = ("run", "what", "requests/s", "core-ms a request", "times the cheapest")
    return ["### As the model grows\n\n" + markdown(heads, rows)] if rows else []


def verdicts(runs: Iterable[Path]) -> str:
    """Return a Markdown table of the pass criteria of all runs, with their figures and verdicts. The runs may have any shape."""
    rows = []
    for run in runs:
        about = json.loads(run.read_text())
        bounds = [f"at most {mark['at_most']:g}" if "at_most" in mark else f"at least {mark['at_least']:g}" for mark in about["marks"]]
        rows += [
            (
                name(run),
                f"{mark['stage']}: {mark['figure']}",
                cell(mark["value"]),
                bound,
                mark["verdict"],
                about["date"][:10],
                mark.get("changed", ""),
            )
            for mark, bound in zip(about["marks"], bounds, strict=True)
        ]
    return "### Pass marks\n\n" + markdown(("run", "mark", "figure", "bound", "", "when", "the mark changed"), rows)


def tables_of(runs: Sequence[Path], absent: Sequence[str] = ()) -> str:
    """Return the text and tables for runs of any shape: the machine, missing runs, ramps, growth during a soak, and all pass criteria."""
    told = {run: json.loads(run.read_text()) for run in runs}
    ramps = [read(run) for run, about in told.items() if about["shape"] == Shape.ramp]
    soaks = [flat(run, about["flatness"]) for run, about in told.items() if about["shape"] == Shape.soak]
    not_run = [f"**Not run**: {', '.join(absent)}."] if absent else []
    return "\n\n".join([conditions_line(list(told.values())), *not_run, *([tables(ramps)] if ramps else []), *soaks, verdicts(runs)])


def conditions_line(abouts: Sequence[dict[str, Any]]) -> str:
    """Return one line with the number of runs, the machine, the commit and the date."""
    cpus = max(about["cpus"] for about in abouts)  # the most, because a load generator on half of the cores reports only that half
    machines = sorted({f"{about['cpu']}, {about['memory_bytes'] / 2**30:.0f} GiB" for about in abouts})
    commits = sorted({f"`{head[:9]}`{comma}{also}" for head, comma, also in (about["commit"].partition(",") for about in abouts)})
    dates = sorted({about["date"][:10] for about in abouts})
    return f"{len(abouts)} runs on {cpus} x {' and '.join(machines)}; commit {' and '.join(commits)}; {' and '.join(dates)}."


def flat(run: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the series that show leaks, such as each process's memory (see `loadtest/load/flatness.py`): their values
    at the beginning and at the end, and their growth."""
    cells = [
        (row["what"], row["unit"], *map(cell, (row["begin"], row["end"], row["growth"])), "" if row["flat"] else "GREW") for row in rows
    ]
    return f"### What grew: {name(run)}\n\n" + markdown(("series", "unit", "begin", "end", "growth, by the slope", ""), cells)


def pictures(runs: Sequence[Path], page: Path) -> str:
    """Copy the pictures of `_PICTURES` next to the page, and return Markdown that shows them."""
    links = []
    for run in runs:
        source, words = _PICTURES.get(name(run), ("", ""))
        if source and run.with_name(source).exists():
            copy = page.with_name(f"{page.stem}-{name(run)}.png")
            with Image.open(run.with_name(source)) as picture:
                # 64 colours halve the file size, which matters because git stores every version of the picture.
                picture.convert("RGB").quantize(64).save(copy, optimize=True)
            links.append(f"![{words}]({copy.name})")
    return "\n\n".join(links)


def name(run: Path) -> str:
    """Return the run's name: `embed-14` for out/capacity/embed-14/DATE-ramp/run.json."""
    return run.parent.parent.name


def knee_of(found: Knee) -> str:
    """Format the knee's rate, with a note if the true knee may be at another rate. The other figures of the knee's step are valid at the
    rate shown in any case."""
    if found.late_ms is not None:
        return f"{cell(found.rate)}, knee not judged (generator {found.late_ms:,.0f} ms late)"
    return cell(found.rate) + ("" if found.reached else " or more")


def per_core(rate: float, stage: StageFigures) -> float | None:
    return rate / stage.service_cores if stage.service_cores else None


def cell(value: float | None) -> str:
    return "not measured" if value is None else amount(value)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def page_with(page: str, measured: str) -> str:
    """Return the page with its measured part replaced. Raises LoadtestError if the page has no markers for this part."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise LoadtestError(f"the page lacks the lines {BEGIN} and {END}, between which the tables are written")
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"
