"""The benchmark of text: every part runs on a tiny decoder, and its rows answer to their bars."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.bench_generate import app, rows
from loadtest.generation import engine, steps
from loadtest.generation.steps import Stretch
from loadtest.report import Verdict


def test_the_step_loop_and_the_engine_are_measured(decoder_bundle: Path) -> None:
    assert steps.tokens_per_s(decoder_bundle, rows=3, seconds=0.05, threads=1) > 0
    assert steps.prefill_tokens_per_s(decoder_bundle, chunk=16, seconds=0.05, threads=1) > 0
    assert engine.tokens_per_s(decoder_bundle, rows=3, seconds=0.05, threads=1) > 0


def test_a_long_sequence_is_told_stretch_by_stretch(decoder_bundle: Path) -> None:
    told = list(steps.long_sequence(decoder_bundle, 60, threads=1, stretch=20))
    assert [stretch.first for stretch in told] == [0, 20, 40]
    assert all(stretch.s_per_token > 0 and stretch.rss_bytes > 0 for stretch in told)


def test_a_run_writes_its_figures_and_its_plot(decoder_bundle: Path, tmp_path: Path) -> None:
    arguments = ["--bundle", str(decoder_bundle), "--only", "flat,prefill", "--rounds", "1", "--seconds", "0.5", "--tokens", "2000"]
    ended = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert ended.exit_code in (0, 1), ended.output  # a noisy machine may miss the bar in two thousand tokens
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())
    assert {"prefill 16", "prefill 1024", "flat"} <= {entry["work"] for entry in told["measurements"]}
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("engine_per_s", "verdict"), [(95.0, Verdict.passed), (80.0, Verdict.failed)])
def test_the_engine_is_held_against_the_bare_loop(engine_per_s: float, verdict: Verdict) -> None:
    (row,) = rows({"bare 8": [100.0] * 3, "engine 8": [engine_per_s] * 3}, [], 8)
    assert row.verdict == verdict


@pytest.mark.parametrize(("last_s", "verdict"), [(0.00102, Verdict.passed), (0.0011, Verdict.failed)])
def test_a_price_that_grows_is_no_flat_price(last_s: float, verdict: Verdict) -> None:
    told = [Stretch(first=0, s_per_token=0.001, rss_bytes=2**20), Stretch(first=99_000, s_per_token=last_s, rss_bytes=2**21)]
    price, memory = rows({}, told, 8)
    assert (price.verdict, memory.figures) == (verdict, (1.0,))


def test_an_unknown_part_is_refused(decoder_bundle: Path) -> None:
    ended = CliRunner().invoke(app, ["--bundle", str(decoder_bundle), "--only", "nothing"])
    assert ended.exit_code == 2
