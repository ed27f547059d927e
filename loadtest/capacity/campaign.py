"""`make capacity`: runs all load tests for docs/capacity.md, one after the other, against services that this command starts and stops.

python -m loadtest.capacity.campaign [--minutes-scale 0.1] [--page docs/capacity.md]

Takes about 65 minutes on an otherwise idle machine. A load test that has a result is repeated only if the result was measured under other
conditions, so the same command continues an interrupted campaign. Failures are listed at the end. If a ramp fails, only the load tests that
need its knee are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from export import contract
from loadtest.capacity import tables
from loadtest.capacity.deep_encoder import deep_encoder
from loadtest.common import machine, terminal
from loadtest.common.report import Verdict
from loadtest.common.server import attnserve, terminate
from loadtest.common.terminal import interruptible
from loadtest.errors import LoadtestError
from loadtest.load.shapes import SECONDS, Shape
from service.terminal import command_app, console

_TRIES = 4  # most attempts at a ramp; it is repeated at other rates until the knee lies between its lowest and highest rate
_LOWER, _HIGHER = 0.4, 1.5  # factors for the rates of the next attempt, if the knee lay below or above those of this one
_NO_PASS = (Verdict.failed, Verdict.not_judged)
_MISSED = (0, 1)  # exit statuses of `attnserve load` if it could measure: 0 if all criteria are met, 1 if one is missed
_STOP_S = 60  # seconds within which `attnserve load` must stop Locust and end
_CONDITIONS = "conditions.json"


@dataclass(frozen=True)
class CampaignRun:
    """One load test of the campaign. The levels of its stages are multiples of a knee: the one that the ramp named `knee_of` found, or a
    guessed one.

    `apart`: service and load generator each use half of the cores, for loads that the service cannot answer in full.
    `deep`: uses the encoder of `loadtest/capacity/deep_encoder.py`.
    """

    name: str
    shape: Shape
    arguments: tuple[str, ...] = ()
    knee_of: str | None = None
    apart: bool = False
    deep: bool = False


RUNS = (
    *(CampaignRun(f"embed-{words}", Shape.ramp, ("--mix", "embed=1", "--words", str(words))) for words in (14, 60, 120, 250)),
    CampaignRun("embed-mixed", Shape.ramp, ("--mix", "embed_mixed=1")),
    CampaignRun("streams", Shape.ramp, ("--mix", "completion=1", "--max-tokens", "128")),
    CampaignRun("everything", Shape.ramp),
    CampaignRun("crowd", Shape.crowd, knee_of="everything"),
    CampaignRun("soak", Shape.soak, knee_of="everything"),
    CampaignRun("embed-apart", Shape.ramp, ("--mix", "embed=1"), apart=True),
    CampaignRun("overload-embed", Shape.overload, ("--mix", "embed=1"), knee_of="embed-apart", apart=True),
    CampaignRun("streams-apart", Shape.ramp, ("--mix", "completion=1", "--max-tokens", "128"), apart=True),
    CampaignRun("overload-streams", Shape.overload, ("--mix", "completion=1", "--max-tokens", "128"), knee_of="streams-apart", apart=True),
    *(CampaignRun(f"deep-{words}", Shape.ramp, ("--mix", "embed=1", "--words", str(words)), deep=True) for words in (14, 120)),
)
_BY_NAME = {step.name: step for step in RUNS}

app = command_app()


@app.command()
def campaign(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    only: Annotated[str, typer.Option(help="Names of runs, with commas between them.", show_default="all")] = "",
    minutes_scale: Annotated[float, typer.Option(min=0.1, help="Of the length of every run; 1 is what figures are made of.")] = 1.0,
    page: Annotated[Path | None, typer.Option(exists=True, help="Page to write the tables into; on stdout without it.")] = None,
    out: Annotated[Path, typer.Option(help="Directory; every run has one of its name there.")] = Path("out/capacity"),
) -> None:
    """Run the load tests that have no result, then make the tables of all results. Exits with 1 if one failed or missed a pass
    criterion."""
    if page:
        tables.page_with(page.read_text(), "")  # raises now if the page has no markers, rather than after an hour of measuring
    runs = CampaignRuns(out, encoder, decoder, minutes_scale)
    failed: dict[str, str] = {}
    try:
        with interruptible():
            failed = runs.make(chosen(only))
    finally:
        found = [run for step in RUNS if (run := runs.found(step))]
        write_tables(found, page, [step.name for step in RUNS if runs.found(step) is None])
    for name, why in failed.items():
        console.print(f"[bold red]{name} failed:[/bold red] {escape(why)}", highlight=False, soft_wrap=True)
    missed = [f"{run.parent.parent.name}: {mark['figure']}" for run in found for mark in read(run)["marks"] if mark["verdict"] in _NO_PASS]
    if missed:
        console.print(f"[red]missed:[/red] {', '.join(missed)}", highlight=False)
    if failed or missed:
        raise typer.Exit(1)


def chosen(only: str) -> list[CampaignRun]:
    """Return the load tests that the comma-separated list `only` names, and the ramps whose knees they need. Raises typer.BadParameter for
    an unknown name."""
    names = {name.strip() for name in only.split(",") if name.strip()} or set(_BY_NAME)
    if unknown := sorted(names - set(_BY_NAME)):
        raise typer.BadParameter(f"{unknown[0]} is not a run; choose from: {', '.join(_BY_NAME)}", param_hint="--only")
    needed = names | {step.knee_of for step in RUNS if step.name in names and step.knee_of}
    return [step for step in RUNS if step.name in needed]


def write_tables(found: Sequence[Path], page: Path | None, absent: Sequence[str]) -> None:
    """Write the tables and pictures into the page, or print the tables if `page` is None. `absent` has the names of load tests without a
    result."""
    if not found:
        console.print("[yellow]no run is there: no tables[/yellow]")
    elif page is None:
        print(tables.tables_of(found, absent))
    else:
        measured = f"{tables.tables_of(found, absent)}\n\n{tables.pictures(found, page)}".strip()
        page.write_text(tables.page_with(page.read_text(), measured))
        console.print(f"written: {page}, of {len(found)} runs", highlight=False)


class CampaignRuns:
    """The results in the folder `out`, and the load tests that are still to be run with these bundles on this machine."""

    def __init__(self, out: Path, encoder: Path, decoder: Path, scale: float) -> None:
        self._out, self._encoder, self._decoder, self._scale = out, encoder, decoder, scale
        self._machine = f"{len(cores())} x {machine.cpu_model().partition(' (')[0]}"
        self._seeds = count()  # each load test has another seed, because the service's cache would answer texts of an earlier one
        self._bundles = [contract.verify(bundle).fingerprint for bundle in (encoder, decoder)]

    def make(self, steps: Sequence[CampaignRun]) -> dict[str, str]:
        """Run the load tests that have no result. Return name -> error of those that failed. After a failure the service is restarted."""
        waiting, failed = deque(step for step in steps if self.found(step) is None), {}
        while waiting:
            first = waiting[0]
            try:
                with self._service(first) as url:
                    while waiting and (waiting[0].apart, waiting[0].deep) == (first.apart, first.deep):
                        console.rule(f"{steps.index(waiting[0]) + 1}/{len(steps)} {waiting[0].name}")
                        self.perform(waiting[0], url)
                        waiting.popleft()
            except LoadtestError as error:
                console.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
                failed[waiting.popleft().name] = str(error)
        return failed

    @contextmanager
    def _service(self, step: CampaignRun) -> Iterator[str]:
        """Start the service for a load test and yield its URL. Processes that are started in the `with` block run on the load generator's
        cores."""
        service_cores, generator_cores = halves() if step.apart else (cores(), cores())
        encoder = deep_encoder(self._encoder, self._out / f"of-{self._bundles[0][:12]}") if step.deep else self._encoder
        service = attnserve(encoder, contract.verify(encoder).name, flags=("--bundle", str(self._decoder)))
        with on_cores(service_cores), service as server, on_cores(generator_cores):
            yield server.address

    def perform(self, step: CampaignRun, url: str) -> None:
        """Run a load test. A ramp is repeated until the knee lies between its lowest and highest rate. Raises LoadtestError on failure."""
        folder, conditions = self._out / step.name, self.conditions(step)
        if step.knee_of and conditions["knee"] is None:
            raise LoadtestError(f"{step.name} needs the knee of {step.knee_of}, which was not measured")
        if changed := self._changed(step):
            console.print(f"run again, under other conditions: {escape(changed)}", highlight=False, soft_wrap=True)
        rate = conditions["knee"]
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)  # removes the result of an earlier attempt that was interrupted or is not valid
            folder.mkdir(parents=True)
            (folder / _CONDITIONS).write_text(json.dumps(conditions, indent=1) + "\n")
            command = [sys.executable, "-m", "loadtest.load", "--url", url, "--shape", step.shape, "--out", str(folder), *step.arguments]
            command += ["--seed", str(next(self._seeds)), "--minutes", str(conditions["minutes"])]
            command += ["--knee", str(rate)] if rate else []
            if (status := exit_status_of(command)) not in _MISSED or not list(folder.glob("*/run.json")):
                raise LoadtestError(f"{step.name} could not be measured: attnserve load ended with {status}")
            if self.found(step):
                return
            rate = next_rate(read(next(folder.glob("*/run.json"))))
        raise LoadtestError(f"{step.name}: none of {_TRIES} ramps has a valid knee within it; the last one is in {folder}")

    def conditions(self, step: CampaignRun) -> dict[str, Any]:
        """Return the conditions that must be the same for an existing result to be used. The commit is not one of them, because the page
        shows the commit of each result."""
        ramp = self.found(_BY_NAME[step.knee_of]) if step.knee_of else None
        return {
            "machine": self._machine,
            "bundles": self._bundles,
            "arguments": [step.shape.value, *step.arguments, *(["apart"] if step.apart else []), *(["deep"] if step.deep else [])],
            "minutes": SECONDS[step.shape] / 60 * self._scale,
            "knee": float(read(ramp)["knee"]["rate"]) if ramp else None,
        }

    def found(self, step: CampaignRun) -> Path | None:
        """Return the run.json of a load test if it has a result that was measured under the current conditions, else None. The result of a
        ramp must also have a valid knee between its lowest and highest rate."""
        runs = sorted((self._out / step.name).glob("*/run.json"))
        if not runs or self._changed(step) or (step.shape == Shape.ramp and next_rate(read(runs[-1])) is not None):
            return None
        return runs[-1]

    def _changed(self, step: CampaignRun) -> str:
        """Return a text that names the conditions under which the existing result was measured and which are different now. It is empty if
        there is no result or no such condition."""
        folder = self._out / step.name
        if not list(folder.glob("*/run.json")):
            return ""
        before = json.loads((folder / _CONDITIONS).read_text()) if (folder / _CONDITIONS).exists() else {}
        return ", ".join(f"{name} was {before.get(name)}" for name, now in self.conditions(step).items() if before.get(name) != now)


def next_rate(run: dict[str, Any]) -> float | None:
    """Return the guess of the knee (requests/s) for the next attempt at a ramp, or None if this attempt found the knee. `run` is the
    content of its run.json. If the load generator was late, the next attempt has the same rates."""
    if run["knee"] is None:
        return _LOWER * float(run["plan"]["rate"])
    if run["knee"].get("late_ms") is not None:
        return float(run["plan"]["rate"])
    return None if run["knee"]["reached"] else _HIGHER * float(run["plan"]["rate"])


def read(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.read_text())
    return content


def exit_status_of(command: Sequence[str]) -> int:
    """Run a command in a session of its own and return its exit status. On Ctrl-C it gets SIGTERM, so that it can stop Locust."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    finally:
        terminate(process, _STOP_S)


def cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """Return the cores for the service and for the load generator. Raises LoadtestError on a machine with one core."""
    mine: Sequence[int] = sorted(cores())
    if len(mine) < 2:
        raise LoadtestError("overload needs a core for the service and another for the generator: this machine has one")
    return frozenset(mine[: len(mine) // 2]), frozenset(mine[len(mine) // 2 :])


@contextmanager
def on_cores(some: frozenset[int]) -> Iterator[None]:
    """Run the processes that are started in the `with` block on these cores."""
    before = cores()
    os.sched_setaffinity(0, some)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    terminal.run(app, "python -m loadtest.capacity.campaign")
