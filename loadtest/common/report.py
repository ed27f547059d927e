"""Turns measurements into rows with a verdict, and rows into a table and Markdown.

A row compares a figure with a reference that was measured in the same round of the benchmark, because a machine's speed drifts from minute
to minute. The row's ratio is the median of the ratios of all rounds. A row with nothing to compare with never counts as passed.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table

Key = tuple[str, str]


class Verdict(StrEnum):
    passed = "pass"
    failed = "FAIL"
    invalid = "INVALID"  # measured, but the measurement had problems, which the row's `note` lists
    not_measured = "not measured"
    not_judged = "not judged"  # only in `attnserve load`: this run could not measure the figure; counts like a failure
    shown = "-"  # the row has no required value


_COLOUR = {Verdict.passed: "green", Verdict.not_measured: "yellow", Verdict.shown: "dim"}  # others are bold red


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A required value. One of three fields is set: `at_least` is the smallest allowed figure / reference, `at_most_more` the largest
    allowed figure - reference, `at_most` the largest allowed figure."""

    reference: str = ""  # the name of the reference with which the figure is compared
    at_least: float | None = None
    at_most_more: float | None = None
    at_most: float | None = None

    def holds(self, figures: Sequence[float], references: Sequence[float]) -> bool | None:
        """Return whether the median over the rounds meets the requirement, or None if a reference is needed and none was measured. Both
        arguments have one value per round."""
        if self.at_most is not None:
            return statistics.median(figures) <= self.at_most
        rounds = list(zip(figures, references, strict=False))
        if not rounds:
            return None
        if self.at_least is not None:
            return statistics.median(figure / reference for figure, reference in rounds) >= self.at_least
        assert self.at_most_more is not None
        return statistics.median(figure - reference for figure, reference in rounds) <= self.at_most_more

    def words(self, unit: str) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g} {unit}"
        if self.at_least is not None:
            return f"at least {self.at_least:g} x {self.reference}"
        return f"at most {self.reference} + {self.at_most_more:g} {unit}"


@dataclass(frozen=True)
class Row:
    """A line of the report: the key (a side, and the name of one of its figures) of a figure, and of the one that it is compared with, and
    the required value. `figures` and `references` are what was measured of them: one value per round, in the same unit."""

    work: str
    unit: str
    key: Key
    reference_key: Key | None = None
    bar: Bar | None = None
    figures: tuple[float, ...] = ()
    references: tuple[float, ...] = ()
    note: str = ""
    invalid: bool = False

    @property
    def ratios(self) -> tuple[float, ...]:
        """Figure divided by reference, for each round."""
        return tuple(figure / reference for figure, reference in zip(self.figures, self.references, strict=False))

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> Verdict:
        if not self.figures:
            return Verdict.not_measured
        if self.invalid:
            return Verdict.invalid
        if self.bar is None:
            return Verdict.shown
        holds = self.bar.holds(self.figures, self.references)
        return Verdict.not_measured if holds is None else Verdict.passed if holds else Verdict.failed

    def cells(self) -> tuple[str, str, str, str, str]:
        """Return the cells of the row: work, figure with its range, requirement with its reference, ratio with its range, verdict."""
        bar = self.bar.words(self.unit) if self.bar else ""
        reference = f" ({amount(statistics.median(self.references))} {self.unit})" if self.references else ""
        work = f"{self.work} [{self.note}]" if self.note else self.work
        return work, spread(self.figures, self.unit), bar + reference, spread(self.ratios), self.verdict.value


def spread(values: Sequence[float], unit: str = "") -> str:
    """Format the median and the range of the values."""
    if not values:
        return ""
    middle = f"{amount(statistics.median(values))} {unit}".strip()
    return middle if len(values) == 1 else f"{middle} ({amount(min(values))} to {amount(max(values))})"


def amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


HEADINGS = ("work", "figure", "bar", "ratio", "")


def table(rows: Sequence[Row], title: str) -> Table:
    drawn = Table(title=title, title_justify="left", show_lines=True)
    for heading in HEADINGS:
        drawn.add_column(heading, overflow="fold")
    for row in rows:
        *cells, verdict = (cell.replace("[", r"\[") for cell in row.cells())
        drawn.add_row(*cells, f"[{_COLOUR.get(row.verdict, 'bold red')}]{verdict}[/]")
    return drawn


def markdown(rows: Sequence[Row], heading: str) -> str:
    lines = [heading, "", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells())} |" for row in rows)]) + "\n"
