"""`make capacity`: all runs that docs/capacity.md is made of, one after the other, against services that this starts and stops.

python -m loadtest.campaign [--minutes-scale 0.1] [--page docs/capacity.md]

About 55 minutes on a machine that does nothing else. A run that is there is not repeated: the same command goes on where one was stopped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from export import contract
from loadtest import capacity, terminal
from loadtest.errors import LoadtestError
from loadtest.load.shapes import SECONDS, Shape
from loadtest.server import attnserve
from loadtest.terminal import console, interruptible

_TRIES = 4  # of a ramp, until its knee lies within
_LOWER, _HIGHER = 0.4, 1.5  # of its rate, for the next one
_MISSED = (0, 1)  # what `attnserve load` ends with when it has measured


@dataclass(frozen=True)
class Step:
    """One run. Where its rate is not guessed it is the knee of the ramp `knee_of`.

    `apart`: service and generator have half of the cores each, for what sends more than the service can answer.
    """

    name: str
    shape: Shape
    arguments: tuple[str, ...] = ()
    knee_of: str | None = None
    apart: bool = False


STEPS = (
    *(Step(f"embed-{words}", Shape.ramp, ("--mix", "embed=1", "--words", str(words))) for words in (14, 60, 120, 250)),
    Step("embed-mixed", Shape.ramp, ("--mix", "embed_mixed=1")),
    Step("streams", Shape.ramp, ("--mix", "completion=1", "--max-tokens", "128")),
    Step("everything", Shape.ramp),
    Step("crowd", Shape.crowd, knee_of="everything"),
    Step("soak", Shape.soak, knee_of="everything"),
    Step("embed-apart", Shape.ramp, ("--mix", "embed=1"), apart=True),
    Step("overload-embed", Shape.overload, ("--mix", "embed=1"), knee_of="embed-apart", apart=True),
    Step("streams-apart", Shape.ramp, ("--mix", "completion=1", "--max-tokens", "128"), apart=True),
    Step("overload-streams", Shape.overload, ("--mix", "completion=1", "--max-tokens", "128"), knee_of="streams-apart", apart=True),
)

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def campaign(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    only: Annotated[str, typer.Option(help="Names of runs, with commas between them.", show_default="all")] = "",
    minutes_scale: Annotated[float, typer.Option(min=0.05, help="Of the length of every run; 1 is what figures are made of.")] = 1.0,
    page: Annotated[Path | None, typer.Option(help="Page to write the tables into; on stdout without it.")] = None,
    out: Annotated[Path, typer.Option(help="Directory; every run has one of its name there.")] = Path("out/capacity"),
) -> None:
    """Make the runs that are not there yet, then the tables. Ends with 1 when a pass mark is missed."""
    wanted = chosen(only)
    with interruptible():
        for apart, steps in groupby([step for step in wanted if found(out / step.name, step.shape) is None], lambda step: step.apart):
            service_cores, generator_cores = halves() if apart else (cores(), cores())
            with on(service_cores), attnserve(encoder, contract.verify(encoder).name, flags=("--bundle", str(decoder))) as server:
                url = f"http://127.0.0.1:{server.port}"
                with on(generator_cores):
                    for step in steps:
                        console.rule(f"{wanted.index(step) + 1}/{len(wanted)} {step.name}")
                        perform(step, url, out, minutes_scale)
    runs = [run for step in wanted if (run := found(out / step.name, step.shape))]
    if page is None:
        print(capacity.tables_of(runs))
    else:
        page.write_text(capacity.written(page.read_text(), capacity.tables_of(runs)))
    missed = [f"{run.parent.parent.name}: {mark['figure']}" for run in runs for mark in read(run)["marks"] if mark["verdict"] == "FAIL"]
    if missed:
        console.print(f"[red]missed:[/red] {', '.join(missed)}", highlight=False)
        raise typer.Exit(1)


def chosen(only: str) -> list[Step]:
    """The steps of these names. typer.BadParameter for a name that is none, or a run without the ramp that its rate is of."""
    names = {name.strip() for name in only.split(",") if name.strip()} or {step.name for step in STEPS}
    if unknown := sorted(names - {step.name for step in STEPS}):
        raise typer.BadParameter(f"{unknown[0]} is no run; there are: {', '.join(step.name for step in STEPS)}", param_hint="--only")
    needed = names | {step.knee_of for step in STEPS if step.name in names and step.knee_of}
    return [step for step in STEPS if step.name in needed]


def found(folder: Path, shape: Shape) -> Path | None:
    """The last run there, if it is worth keeping: of a ramp, one that has its knee within."""
    runs = sorted(folder.glob("*/run.json"))
    return runs[-1] if runs and (shape != Shape.ramp or next_rate(read(runs[-1])) is None) else None


def perform(step: Step, url: str, out: Path, scale: float) -> None:
    """The run; of a ramp as many as it takes. LoadtestError when none will do."""
    folder = out / step.name
    rate = knee_rate(out / step.knee_of) if step.knee_of else None
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)  # of a try that was stopped, or has its knee elsewhere
        command = [sys.executable, "-m", "loadtest.load", "--url", url, "--shape", step.shape, "--out", str(folder), *step.arguments]
        command += ["--minutes", str(SECONDS[step.shape] / 60 * scale), *(["--knee", str(rate)] if rate else [])]
        if (status := subprocess.run(command, check=False).returncode) not in _MISSED or not list(folder.glob("*/run.json")):
            raise LoadtestError(f"{step.name} could not be measured: attnserve load ended with {status}")
        if found(folder, step.shape):
            return
        rate = next_rate(read(next(folder.glob("*/run.json"))))
    raise LoadtestError(f"{step.name}: no knee within after {_TRIES} ramps; the last one is in {folder}")


def next_rate(run: dict[str, Any]) -> float | None:
    """Of the next ramp, where the knee is not within this one."""
    if run["knee"] is None:
        return _LOWER * float(run["plan"]["rate"])
    return None if run["knee"]["reached"] else _HIGHER * float(run["plan"]["rate"])


def knee_rate(folder: Path) -> float:
    run = found(folder, Shape.ramp)
    assert run is not None
    return float(read(run)["knee"]["rate"])


def read(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.read_text())
    return content


def cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """Cores for the service and for the generator. LoadtestError on a machine with one."""
    mine: Sequence[int] = sorted(cores())
    if len(mine) < 2:
        raise LoadtestError("overload needs a core for the service and another for the generator: this machine has one")
    return frozenset(mine[: len(mine) // 2]), frozenset(mine[len(mine) // 2 :])


@contextmanager
def on(some: frozenset[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores."""
    before = cores()
    os.sched_setaffinity(0, some)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    terminal.run(app, "python -m loadtest.campaign")
