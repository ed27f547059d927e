"""Runs a benchmark: its sides (the programs or models that are compared) are measured in turns, round by round, because the speed of a
shared machine varies by a third within minutes. The figures become rows with ratios and verdicts, a table, and two files.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from export import contract
from loadtest.common import machine, report
from loadtest.common.report import Key, Row, Verdict
from loadtest.common.terminal import progress, stdout
from loadtest.errors import LoadtestError
from service.terminal import console

ENOUGH_ROUNDS = 3  # fewest rounds that figures need to be published
IDLE = 0.25  # load average per core up to which the machine counts as idle


class Figure(NamedTuple):
    """One measured value. `note` explains it. `problem` is the reason why the measurement is not valid; empty if it is."""

    value: float
    note: str = ""
    problem: str = ""


Figures = Mapping[str, float | Figure]  # name -> value


@dataclass(frozen=True)
class Side:
    """A program or model that is compared with others. `start` runs it; `steps` measure what `start` yields, each some figures. The steps
    with the same name on all sides are chosen together by `--only`."""

    name: str
    steps: Mapping[str, Callable[[Any], Figures]]
    start: Callable[[], AbstractContextManager[Any]] = nullcontext
    optional: bool = False  # if it fails, the other sides continue without it
    once: bool = False  # measured in the last round only


@dataclass(frozen=True)
class Benchmark:
    """`absent`: side -> the reason why it cannot be measured here."""

    sides: Sequence[Side]
    rows: Sequence[Row]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user has chosen. `seconds`: length of one measurement. `folder`: a temporary folder. `stack` closes what a benchmark opens
    for all rounds."""

    bundles: Sequence[Path]
    seconds: float
    options: Mapping[str, str]
    folder: Path
    stack: ExitStack

    def manifest(self, at: int, kind: str) -> contract.Manifest:
        """Return the manifest of a bundle. Raises LoadtestError if it is of another kind, ContractError if it is damaged."""
        manifest = contract.verify(self.bundles[at])
        if manifest.kind != kind:
            raise LoadtestError(f"{self.bundles[at]} is of kind {manifest.kind}, but this part measures a bundle of kind {kind}")
        return manifest


class Measured:
    """All figures, one a round and key."""

    def __init__(self, benchmark: Benchmark) -> None:
        self.figures: dict[Key, list[Figure]] = {}
        self.absent = dict(benchmark.absent)

    def judged(self, row: Row) -> Row:
        """Return the row with its figures. It is invalid if one of its measurements had a problem."""
        keys = [key for key in (row.key, row.reference_key) if key]
        figures, references = ([each.value for each in self.figures.get(key or ("", ""), [])] for key in (row.key, row.reference_key))
        problems = [f"{key[0]}: {each.problem}" for key in keys for each in self.figures.get(key, []) if each.problem]
        missing = [self.absent.get(key[0], "") for key in keys if not self.figures.get(key)]
        notes = dict.fromkeys([*problems, *missing, *(each.note for each in self.figures.get(row.key, [])[-1:])])
        note = "; ".join(filter(None, notes))
        return replace(row, figures=tuple(figures), references=tuple(references), note=note, invalid=bool(problems))


def run(benchmark: Benchmark, rounds: int, only: Collection[str], begin: Callable[[str], object] = lambda label: None) -> Measured:
    """Measure every side in every round. `only` has the names of the steps; none: all. `begin` is called with the name of each step.
    Raises LoadtestError if a side that is not optional fails."""
    measured = Measured(benchmark)
    for number in range(1, rounds + 1):
        for side in benchmark.sides:
            steps = {name: step for name, step in side.steps.items() if name in only or not only}
            if not steps or side.name in measured.absent or (side.once and number < rounds):
                continue
            label = f"round {number}/{rounds}: {side.name}"
            try:
                begin(f"{label}, starting")
                with side.start() as subject:
                    for name, step in steps.items():
                        begin(f"{label}, {name}")
                        for figure, value in step(subject).items():
                            found = value if isinstance(value, Figure) else Figure(value)
                            measured.figures.setdefault((side.name, figure), []).append(found)
            except LoadtestError as error:
                if not side.optional:
                    raise
                measured.absent[side.name] = str(error)
    return measured


def judge(benchmark: Benchmark, measured: Measured, only: Collection[str]) -> list[Row]:
    """Return the rows of all that was measured or, if nothing was left out by `only`, should have been."""
    rows = [measured.judged(row) for row in benchmark.rows]
    return [row for row in rows if row.figures or (row.note and not only)]


def show(part: str, plan: Plan, benchmark: Benchmark, rounds: int, only: Collection[str], out: Path, *, markdown: bool) -> None:
    """Measure everything, print the table, and write it with every figure, machine, versions and command to `out`. Raises typer.Exit(1) if
    a required value is missed or a row is invalid."""
    steps = {name for side in benchmark.sides for name in side.steps}
    if unknown := set(only) - steps:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {','.join(sorted(steps))}", param_hint="--only")
    about = machine.about_run()
    if (load := about["load_average_before"][0]) > IDLE * about["cpus"]:
        console.print(f"[bold yellow]the machine is not idle[/bold yellow]: load average {load:.2f}. The figures will not be reliable.")
    if rounds < ENOUGH_ROUNDS:
        console.print(f"[yellow]fewer than {ENOUGH_ROUNDS} rounds: that shows that everything runs, and gives no figures to quote[/yellow]")
    with progress(sum((1 + len(side.steps)) * (1 if side.once else rounds) for side in benchmark.sides)) as begin:
        measured = run(benchmark, rounds, only, begin)
    rows = judge(benchmark, measured, only)
    manifests = [contract.read_manifest(bundle) for bundle in plan.bundles if (bundle / contract.MANIFEST).exists()]
    about["bundles"] = [{"name": each.name, "precision": each.precision, "fingerprint": each.fingerprint} for each in manifests]
    about["plan"] = {"rounds": rounds, "seconds": plan.seconds, "only": sorted(only), **plan.options}
    told = [{**asdict(row), "ratio": row.ratio, "verdict": row.verdict.value} for row in rows]
    entries = [
        {"side": side, "figure": name, "rounds": [each._asdict() for each in found]} for (side, name), found in measured.figures.items()
    ]
    subject = ", ".join(f"{each.name} {each.precision}" for each in manifests)
    title = f"{part}, {subject}, {about['cpus']} cores, {about['cpu']}, {rounds} rounds of {plan.seconds:g} s, {about['date']}"
    file = out / part / f"{about['date'].replace(':', '-')}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**about, "rows": told, "measurements": entries}, indent=1, ensure_ascii=False) + "\n")
    file.with_suffix(".md").write_text(page := report.markdown(rows, title))
    if markdown:
        print(page)
    else:
        stdout(width=150).print(report.table(rows, title))
    console.print(f"every figure: {file}", soft_wrap=True)
    if any(row.verdict in (Verdict.failed, Verdict.invalid) for row in rows):
        raise typer.Exit(1)
