"""Runs a benchmark: contestants are measured in turns, round by round. The figures become rows with verdicts, a table and a JSON file.

The commands `attnserve bench`, `bench-generate`, `bench-long`, `bench-states` and `bench-split` define contestants and comparisons as data.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from export import contract
from loadtest.common import machine, report
from loadtest.common.report import Bar, ReportRow, Verdict
from loadtest.common.terminal import interruptible, progress, show
from loadtest.errors import LoadtestError
from service.terminal import console

Rounds = Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Length of one measurement.")]
WholeSeconds = Annotated[float, typer.Option(min=1, help="Length of each run of the load generator.")]
Out = Annotated[Path, typer.Option(help="Directory for the JSON and the pictures of this run.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")]
ENOUGH_ROUNDS = 3  # fewest rounds that figures need to be published
IDLE = 0.25  # load average per core up to which the machine counts as idle


# Measuring -------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Measurements:
    """All measurements in order. Each entry has the round, the work (what was measured), the contestant, and the figures. `absent` maps a
    contestant without figures to the reason why it has none."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    round: int = 0

    def note(self, work: str, contestant: str, **figures: Any) -> None:
        self.entries.append({"round": self.round, "work": work, "contestant": contestant, **figures})

    def of(self, work: str, contestant: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["work"] == work and entry["contestant"] == contestant]

    def problems(self, work: str, contestant: str) -> list[str]:
        return [problem for entry in self.of(work, contestant) for problem in entry.get("problems", [])]


@dataclass(frozen=True)
class Measurement:
    """One step of a contestant's turn. `measure` is called with the value that the contestant's `start` yields, and records figures."""

    label: str
    measure: Callable[[Any], object]


@dataclass(frozen=True)
class Contestant:
    """A program or model that a benchmark compares with others. `start` runs it while its steps are measured. If `start` is None, each step
    starts the processes that it needs."""

    name: str
    steps: Sequence[Measurement]
    start: Callable[[], AbstractContextManager[Any]] | None = None
    optional: bool = False  # if it fails, the other contestants continue without it
    once: bool = False  # whether it is measured only once, in the last round

    @property
    def shown(self) -> int:
        """The number of steps that the progress bar counts for one turn of this contestant."""
        return len(self.steps) + (self.start is not None)


def step_count(contestants: Sequence[Contestant], rounds: int) -> int:
    return sum(contestant.shown * (1 if contestant.once else rounds) for contestant in contestants)


class Unfinished:
    """The turns of contestants that an interrupted benchmark with the same plan has already measured. They are stored in a file."""

    def __init__(self, file: Path, plan: Mapping[str, Any]) -> None:
        self._file, self._plan = file, json.loads(json.dumps(plan))
        self._turns: list[dict[str, Any]] = []
        if file.exists() and (found := json.loads(file.read_text()))["plan"] == self._plan:
            self._turns = found["turns"]

    def entries(self, round_: int, contestant: str) -> list[dict[str, Any]] | None:
        """Return the stored measurements of a contestant's turn in a round, or None if this turn has not been measured."""
        return next((each["entries"] for each in self._turns if each["turn"] == [round_, contestant]), None)

    def add(self, round_: int, contestant: str, entries: list[dict[str, Any]]) -> None:
        self._turns.append({"turn": [round_, contestant], "entries": entries})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"plan": self._plan, "turns": self._turns}))


def measure(
    contestants: Sequence[Contestant],
    rounds: int,
    measured: Measurements,
    begin: Callable[[str], object],
    unfinished: Unfinished | None = None,
) -> None:
    """Measure every contestant in every round, and add the entries to `measured`. `begin` is called with the name of each step when it
    begins. Turns that are in `unfinished` are not measured again. Raises LoadtestError if a contestant that is not optional fails."""
    for measured.round in range(1, rounds + 1):
        for contestant in contestants:
            last = measured.round == rounds and contestant.once
            if not (last or not contestant.once) or contestant.name in measured.absent:
                continue
            label = f"round {measured.round}/{rounds}: {contestant.name}"
            if unfinished is not None and (entries := unfinished.entries(measured.round, contestant.name)) is not None:
                for _ in range(contestant.shown):
                    begin(f"{label}, measured before")
                measured.entries += entries
                continue
            before = len(measured.entries)
            _turn(contestant, label, measured, begin)
            if unfinished is not None:
                unfinished.add(measured.round, contestant.name, measured.entries[before:])


def _turn(contestant: Contestant, label: str, measured: Measurements, begin: Callable[[str], object]) -> None:
    try:
        if contestant.start is not None:
            begin(f"{label}, starting")
        with (contestant.start or nullcontext)() as subject:
            for step in contestant.steps:
                begin(f"{label}, {step.label}")
                step.measure(subject)
    except LoadtestError as error:
        if not contestant.optional:
            raise
        measured.absent[contestant.name] = str(error)


# Judging ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Selects the figures of one work and contestant from the measurements. `name` is the dotted path of the figure in an entry. Each
    figure is multiplied by `scale`. If a round has several entries, `best` (max or min) chooses one of them; without `best` all are used.
    If `over` is given, each figure is divided by that figure of the same round."""

    work: str
    contestant: str
    name: str = "per_s"
    scale: float = 1.0
    best: Callable[[Iterable[float]], float] | None = None
    over: "Figure | None" = None

    def of(self, measured: Measurements) -> tuple[float, ...]:
        by_round: dict[int, list[float]] = {}
        for entry in measured.of(self.work, self.contestant):
            value: Any = entry
            for key in self.name.split("."):
                value = value[key]
            by_round.setdefault(entry["round"], []).append(self.scale * value)
        values = [value for found in by_round.values() for value in ([self.best(found)] if self.best else found)]
        divisors = self.over.of(measured) if self.over else (1.0,) * len(values)
        return tuple(value / divisor for value, divisor in zip(values, divisors, strict=True))


def compare(
    measured: Measurements, work: str, unit: str, figure: Figure, reference: Figure | None = None, bar: Bar | None = None, note: str = ""
) -> ReportRow:
    """Return a row of the report that compares `figure` with `reference` and the required value `bar`. The row is invalid if one of its
    measurements had problems. The row's note has these problems, the reasons why figures are missing, the note of the figure's last entry,
    and `note`."""
    figures, references = figure.of(measured), reference.of(measured) if reference else ()
    noted = [entry["note"] for entry in measured.of(figure.work, figure.contestant)[-1:] if "note" in entry]
    problems = measured.problems(figure.work, figure.contestant)
    if reference and reference.contestant != figure.contestant:
        problems += [f"{reference.contestant}: {each}" for each in measured.problems(reference.work, reference.contestant)]
    absent = [each for each, values in ((figure, figures), (reference, references)) if each and not values]
    notes = dict.fromkeys([*problems, *(measured.absent.get(each.contestant, "") for each in absent), *noted, note])
    return ReportRow(
        work=work, unit=unit, figures=figures, references=references, bar=bar, note="; ".join(filter(None, notes)), invalid=bool(problems)
    )


# Reporting -------------------------------------------------------------------------------------------------------------------------------


def manifest_of(bundle: Path, kind: str) -> contract.Manifest:
    """Return the verified manifest. Raises LoadtestError if the bundle is of another kind, ContractError if it is damaged."""
    manifest = contract.verify(bundle)
    if manifest.kind != kind:
        raise LoadtestError(f"{bundle} is of kind {manifest.kind}, but this benchmark measures {kind}s: give another bundle")
    return manifest


def run(
    contestants: Sequence[Contestant],
    rounds: int,
    measured: Measurements,
    bundles: Sequence[Path],
    plan: dict[str, Any],
    kept: Path | None = None,
) -> dict[str, Any]:
    """Measure everything with a progress bar. Returns the head of the JSON file: machine, versions, command, plan.

    `kept`: a file in which finished turns are stored. If the benchmark is interrupted, the same command reads them and continues.
    """
    about: dict[str, Any] = {
        **machine.about_run(),
        "bundles": [
            {"name": manifest.name, "precision": manifest.precision, "fingerprint": manifest.fingerprint}
            for manifest in map(contract.read_manifest, bundles)
        ],
        "plan": {"rounds": rounds, **plan},
    }
    load = about["load_average_before"][0]
    if load > IDLE * about["cpus"]:
        console.print(f"[bold yellow]the machine is not idle[/bold yellow]: load average {load:.2f}. The figures will not be reliable.")
    if rounds < ENOUGH_ROUNDS:
        console.print(
            f"[yellow]fewer than {ENOUGH_ROUNDS} rounds: enough to show that everything runs, too few for figures to quote[/yellow]"
        )
    missing = dict(measured.absent)
    _warn_of(missing)
    before = machine.cpu_times()
    same = {key: about[key] for key in ("cpu", "commit", "bundles", "plan")}
    with interruptible(), progress(step_count(contestants, rounds)) as begin:
        measure(contestants, rounds, measured, begin, None if kept is None else Unfinished(kept, same))
    if kept is not None:
        kept.unlink(missing_ok=True)
    after = machine.cpu_times()
    _warn_of({name: why for name, why in measured.absent.items() if name not in missing})
    return about | {"stolen_share": (after["stolen"] - before["stolen"]) / max(after["all"] - before["all"], 1)}


def _warn_of(absent: dict[str, str]) -> None:
    for contestant, why in absent.items():
        console.print(f"[yellow]{contestant}[/yellow]: {why}", highlight=False, soft_wrap=True)


def finish(
    rows: Sequence[ReportRow],
    measured: Measurements,
    about: dict[str, Any],
    *,
    subject: str,
    out: Path,
    markdown: bool,
    draw: Callable[[Path, str], None] = lambda file, hardware: None,
    judged: bool = True,
) -> None:
    """Write the JSON file, draw the pictures, print the table. Raises typer.Exit(1) if `judged` and a required value is missed or a row is
    invalid."""
    file, hardware = out / f"{about['date'].replace(':', '-')}.json", f"{about['cpus']} cores, {about['cpu']}"
    report.write_json(file, rows, about, measured.entries)
    draw(file, hardware)
    plan = about["plan"]
    show(rows, f"{subject}, {hardware}, {plan['rounds']} rounds of {plan['seconds']:g} s, {about['date']}", markdown=markdown)
    console.print(f"every figure: {file}", soft_wrap=True)
    if judged and any(row.verdict in (Verdict.failed, Verdict.invalid) for row in rows):
        raise typer.Exit(1)
