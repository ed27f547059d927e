"""Medians, ratios and verdicts, on made-up numbers."""

from io import StringIO

import pytest
from rich.console import Console

from loadtest.common.report import Bar, Row, Verdict, markdown, table

AT_LEAST = Bar(at_least=0.85, reference="bare")


def row(figures: tuple[float, ...], references: tuple[float, ...] = (), bar: Bar | None = AT_LEAST, **more: object) -> Row:
    return Row(
        **{"work": "short", "unit": "texts/s", "key": ("ours", "rate"), "figures": figures, "references": references, "bar": bar, **more}
    )


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    drifting = row((90, 45, 200), (100, 50, 400))  # ratios 0.9, 0.9, 0.5; medians 90 and 100
    assert drifting.ratio == 0.9
    assert drifting.ratios == (0.9, 0.9, 0.5)


@pytest.mark.parametrize(
    ("figures", "references", "bar", "verdict"),
    [
        ((85.0,), (100.0,), AT_LEAST, Verdict.passed),
        ((84.9,), (100.0,), AT_LEAST, Verdict.failed),
        ((90.0, 80.0, 80.0), (100.0, 100.0, 100.0), AT_LEAST, Verdict.failed),
        ((6.0,), (4.0,), Bar(at_most_more=2, reference="bare"), Verdict.passed),
        ((6.1,), (4.0,), Bar(at_most_more=2, reference="bare"), Verdict.failed),
        ((14.0, 16.0, 15.0), (), Bar(at_most=15), Verdict.passed),
        ((14.0, 16.0, 15.1), (), Bar(at_most=15), Verdict.failed),
        ((85.0,), (), AT_LEAST, Verdict.not_measured),
        ((6.0,), (), Bar(at_most_more=2, reference="bare"), Verdict.not_measured),
        ((), (100.0,), AT_LEAST, Verdict.not_measured),
        ((), (), Bar(at_most=15), Verdict.not_measured),
        ((500.0,), (), None, Verdict.shown),
    ],
)
def test_verdicts(figures: tuple[float, ...], references: tuple[float, ...], bar: Bar | None, verdict: Verdict):
    assert row(figures, references, bar).verdict is verdict


def test_a_run_with_problems_never_passes():
    assert row((100.0,), (100.0,), invalid=True).verdict is Verdict.invalid


def test_the_table_shows_figure_spread_bar_and_verdict():
    text = StringIO()
    rows = [row((90, 80, 85), (100, 100, 100), note="a [note]"), row((10.0,), (100.0,))]
    Console(file=text, width=200).print(table(rows, "title"))
    assert "85.0 texts/s (80.0 to 90.0)" in text.getvalue()
    assert "at least 0.85 x bare (100 texts/s)" in text.getvalue()
    assert "short [a [note]]" in text.getvalue()
    assert "FAIL" in text.getvalue()


def test_markdown_is_a_table_with_every_row():
    lines = markdown([row((90,), (100,)), row(())], "title").splitlines()
    assert lines[0] == "title"
    assert lines[-2] == "| short | 90.0 texts/s | at least 0.85 x bare (100 texts/s) | 0.90 | pass |"
    assert lines[-1] == "| short |  | at least 0.85 x bare |  | not measured |"
    assert len({line.count("|") for line in lines[2:]}) == 1
