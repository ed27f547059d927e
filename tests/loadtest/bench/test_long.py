"""The benchmark of long texts: its rows, its picture, and which lengths it measures."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from loadtest.bench import long
from loadtest.bench.runner import Measurements
from loadtest.common.report import ReportRow, Verdict
from loadtest.errors import LoadtestError
from loadtest.in_process import bare


def test_the_bars_are_at_the_shortest_and_the_longest_text() -> None:
    linear = {512: [980.0], 1_024: [900.0], 8_192: [5_000.0, 4_000.0]}
    assert [(row.work, row.verdict) for row in judged(linear, {512: [1_000.0], 1_024: [1_000.0], 8_192: [1_000.0, 900.0]})] == [
        ("one text of 512 tokens", Verdict.passed),
        ("one text of 1,024 tokens", Verdict.shown),
        ("one text of 8,192 tokens", Verdict.passed),
    ]
    assert judged({512: [850.0], 8_192: [5_000.0]}, {512: [1_000.0], 8_192: [1_000.0]})[0].verdict is Verdict.failed
    slower = judged({8_192: [3_000.0]}, {8_192: [1_000.0]})
    assert slower[0].verdict is Verdict.failed


def judged(linear: dict[int, list[float]], teacher: dict[int, list[float]]) -> list[ReportRow]:
    """The rows of these tokens a second, by length and round."""
    measured = Measurements()
    for contestant, rates in (("linear", linear), ("teacher", teacher)):
        for length, figures in rates.items():
            for measured.round, figure in enumerate(figures, 1):
                measured.note(long.work_of(length), contestant, tokens_per_s=figure)
    return long.rows(measured, list(linear))


@pytest.mark.parametrize(("limits", "lengths"), [((8_192, 8_192), [512, 1_024, 2_048, 4_096, 8_192]), ((8_192, 1_500), [512, 1_024])])
def test_lengths_are_those_that_both_bundles_read(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], lengths: list[int]) -> None:
    monkeypatch.setattr(long.contract, "verify", lambda folder: manifest(limits[int(folder.name)]))
    assert long.lengths_of({"teacher": Path("0"), "linear": Path("1")}) == lengths


def test_bundles_of_short_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long.contract, "verify", lambda folder: manifest(256))
    with pytest.raises(LoadtestError, match="up to 256 tokens, but the shortest measured length is 512"):
        long.lengths_of({"teacher": Path("0")})


def test_a_run_writes_every_figure_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(long.contract, "verify", lambda folder: manifest(1_024))
    monkeypatch.setattr(long.contract, "read_manifest", lambda folder: manifest(1_024))
    monkeypatch.setattr(bare, "measure", lambda folder, shapes, **options: {shape: {"texts_per_s": 1.0} for shape in shapes})
    ended = CliRunner().invoke(long.app, ["--out", str(tmp_path), "--rounds", "1", "--markdown"])
    assert ended.exit_code == 1  # as fast as the teacher is not 4 times as fast
    assert "one text of 1,024 tokens" in ended.output
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".png"]


def manifest(max_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(limits=SimpleNamespace(max_tokens=max_tokens), fingerprint="0" * 64, name="m", precision="fp32")
