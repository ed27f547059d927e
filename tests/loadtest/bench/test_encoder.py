"""From measurements to the rows of the report; and the command's own words."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.bench import encoder
from loadtest.bench.encoder import BenchPart, Work, app, rows
from loadtest.bench.runner import Measurements, step_count
from loadtest.common.report import ReportRow, Verdict
from loadtest.common.terminal import chosen


def judged(
    *rounds: list[dict[str, Any]], parts: frozenset[BenchPart] = frozenset(BenchPart), absent: dict[str, str] | None = None
) -> list[ReportRow]:
    return rows(parts, Measurements([entry for entries in rounds for entry in entries], absent or {}))


def round_of(
    number: int, *, per_s: float = 90, p50_ms: float = 5, infinity: float = 40, problems: list[str] | None = None
) -> list[dict[str, Any]]:
    """What one round on a made-up machine notes down: the bare runtime makes 100 texts a second, spinning 80."""
    entries: list[dict[str, Any]] = [{"work": "start", "contestant": "attnserve", "seconds": 9.0}]
    for work in ("short", "bulk"):
        for spin, rate, p50 in ((False, 100.0, 4.0), (True, 80.0, 4.5)):
            entries.append(
                {"work": work, "contestant": "bare", "spin": spin, "batch": {"texts_per_s": rate}, "one": {"p50_ms": p50}, "tokens": 16}
            )
    load = {"per_s": per_s, "per_s_at_most": per_s + 1, "allowed_per_s": 100.0, "wrk": {"p50_ms": p50_ms}, "problems": problems or []}
    for work in ("short, 32 connections", "short, 1 connection", "mix, 32 connections", "mix, 8 connections", "bulk"):
        entries.append({"work": work, "contestant": "attnserve", **load})
        if infinity:
            peer = {**load, "per_s": infinity - 1, "per_s_at_most": infinity, "problems": []}
            entries.append({"work": work, "contestant": "infinity", **peer})
    process = {"pid": 1, "name": "raylet", "pss_bytes": 2**20}
    entries.append({"work": "memory", "contestant": "attnserve", "pss_bytes": 2**20, "processes": [process], "note": "raylet 1"})
    entries.append({"work": "idle", "contestant": "attnserve", "cores": 0.05})
    return [{"round": number, **entry} for entry in entries]


def barred(of: list[ReportRow]) -> dict[str, ReportRow]:
    return {f"{row.work} | {row.bar.words(row.unit)}": row for row in of if row.bar}


def test_every_bar_has_a_row_and_a_verdict():
    made = barred(judged(round_of(1), round_of(2)))
    assert len(made) == 7
    assert {row.verdict for row in made.values()} == {Verdict.passed}


def test_the_better_bare_runtime_is_the_reference():
    made = judged(round_of(1), round_of(2))
    assert made[0].references == (100, 100)
    one = next(row for row in made if row.unit == "ms" and row.bar)
    assert one.references == (4, 4)


def test_missed_bars_fail():
    made = barred(judged(round_of(1, per_s=50, p50_ms=6.5))).values()
    assert sum(row.verdict is Verdict.failed for row in made) == 6  # all but the start


def test_the_peer_is_taken_at_its_most():
    row = next(row for row in judged(round_of(1)) if row.bar and "infinity" in row.bar.reference)
    assert row.references == (40,)


def test_without_a_peer_its_rows_are_not_measured_and_say_why():
    peers = [
        row
        for row in judged(round_of(1, infinity=0), absent={"infinity": "infinity-emb is not in DIR"})
        if row.bar and "infinity" in row.bar.reference
    ]
    assert [row.verdict for row in peers] == [Verdict.not_measured] * 2
    assert {row.note for row in peers} == {"infinity-emb is not in DIR"}


def test_a_cache_hit_makes_rows_invalid():
    made = barred(judged(round_of(1, problems=["3 texts came from the cache or joined others"]))).values()
    assert sum(row.verdict is Verdict.invalid for row in made) == 6
    assert any("3 texts came from the cache" in row.note for row in made)


def test_parts_that_were_not_asked_for_have_no_rows():
    made = judged(round_of(1), parts=frozenset({BenchPart.start}))
    assert [row.unit for row in made] == ["s"]


def test_parts_are_chosen_by_name():
    assert chosen("short, mix", BenchPart) == {BenchPart.short, BenchPart.mix}
    result = CliRunner().invoke(app, ["--only", "short,bulky"])
    assert result.exit_code == 2
    assert "short,mix,bulk,memory,start" in result.output


def test_help_lists_the_options():
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(option in result.output for option in ("--rounds", "--seconds", "--quick", "--only", "--peer-env", "--markdown"))


@pytest.mark.parametrize(("peer", "steps"), [(None, 2 * 10 + 2), (Path("p"), 2 * 16 + 2)])
def test_the_number_of_steps_is_known_beforehand(peer: Path | None, steps: int):
    work = Work(Path("b"), "m", 256, 1, frozenset(BenchPart), peer, Measurements())
    assert step_count(work.contestants(), 2) == steps


def test_bundles_beside_the_measured_one_are_served_too(monkeypatch: pytest.MonkeyPatch):
    asked = []
    started = lambda *_, **given: asked.append(given) or nullcontext(SimpleNamespace(start_s=1.0))  # noqa: E731
    monkeypatch.setattr(encoder, "attnserve", started)
    work = Work(Path("a"), "m", 256, 1, frozenset({BenchPart.memory}), None, Measurements(), beside=[Path("b"), Path("c")])
    for contestant in work.contestants():
        assert contestant.start is not None
        with contestant.start():
            pass
    flags = ["--bundle", "b", "--bundle", "c"]
    assert asked == [{"flags": flags}, {"flags": flags, "lean": True}]
