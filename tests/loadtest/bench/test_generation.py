"""The benchmark of text: its maths on given figures, its parts on tiny decoders, and one run of the command. No speed is judged here."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from export import contract
from loadtest.bench.generation import command, contestants, plots
from loadtest.bench.generation.command import app
from loadtest.bench.generation.contestants import NO_CHECKPOINT, GenerationPart, GenerationPlan, build
from loadtest.bench.generation.measuring import CHUNKS
from loadtest.bench.generation.rows import rows
from loadtest.bench.runner import Measurements
from loadtest.common import machine
from loadtest.common.report import ReportRow, Verdict
from loadtest.errors import LoadtestError
from loadtest.in_process import batches, engine, latency, steps
from loadtest.in_process.decoders import config_of
from loadtest.in_process.shapes import POSITIONS, SHAPES, ModelShape
from loadtest.in_process.steps import Stretch
from loadtest.in_process.twin import Line, Twin, crossover, fitted
from tests.decoders import tiny_decoder

TINY_SHAPE = ModelShape(name="MNIST", steps=20, n_layers=1, d_model=16, n_heads=2, d_feedforward=24, paper_ms=7.0, paper_times=19)
MEMORY_BYTES = 2**15
WITHOUT_SERVICE = [
    part for part in GenerationPart if part not in (GenerationPart.service, GenerationPart.sharing)
]  # which start Ray and take half a minute


def plan(*parts: GenerationPart, bundle: Path = Path("b"), **more: Any) -> GenerationPlan:
    values: dict[str, Any] = {"seconds": 0.02, "slots": 8, "tokens": 2000, "threads": 1, "shapes": SHAPES[:1]}
    return GenerationPlan(bundle=bundle, model="m", parts=frozenset(parts), memory_bytes=MEMORY_BYTES, **values | more)


def stretch(first: int, s_per_token: float, *, tokens: int = 1000, rss_bytes: int = 2**20) -> Stretch:
    return Stretch(first=first, tokens=tokens, s_per_token=s_per_token, rss_bytes=rss_bytes)


def growing(at_0_s: float, s_per_position: float, *, tokens: int = 4000) -> list[Stretch]:
    """A straight line, in stretches of 500."""
    return [stretch(first, at_0_s + s_per_position * (first + 250), tokens=500) for first in range(0, tokens, 500)]


Figures = dict[tuple[str, str], list[dict[str, Any]]]  # by work and contestant


def noted(
    figures: Figures, *, ours: Sequence[Stretch] = (), twins: Sequence[Stretch] = (), absent: dict[str, str] | None = None
) -> Measurements:
    """Figures of one round, with those of a long sequence of the bundle and its twin."""
    measured = Measurements(absent=absent or {}, round=1)
    for (work, contestant), found in figures.items():
        for each in found:
            measured.note(work, contestant, **each)
    for contestant, stretches in (("bundle", ours), ("bundle's twin", twins)):
        for stretch in stretches:
            measured.note("long sequence", contestant, **asdict(stretch))
    return measured


def per_s(*figures: float) -> list[dict[str, Any]]:
    return [{"per_s": figure} for figure in figures]


def made(part: GenerationPart, figures: Figures, **more: Any) -> list[ReportRow]:
    return rows(plan(part, **more), noted(figures))


# Where the curves cross


def test_the_line_goes_through_the_middles() -> None:
    line = fitted(growing(0.001, 2e-7))
    assert (line.at_0_s, line.s_per_position) == pytest.approx((0.001, 2e-7))
    assert Line(1.0, 0.5).at(4) == 3.0


@pytest.mark.parametrize(
    ("flat_s", "position"),
    [
        (0.0005, 0),  # always dearer
        (0.00130, 3000),  # the stretch up to 3,000 costs 0.001275, the next one 0.001325
        (0.0030, 20_000),  # beyond what was measured: 0.001 + 1e-7 t
    ],
)
def test_ours_is_cheaper_from_where_the_twin_is_dearer_for_good(flat_s: float, position: float) -> None:
    flat = [stretch(0, flat_s), stretch(1000, flat_s), stretch(2000, 100 * flat_s)]  # one bad stretch changes nothing
    assert crossover(flat, growing(0.0010, 1e-7)) == pytest.approx(position)


def test_a_price_that_falls_is_never_crossed() -> None:
    assert crossover([stretch(0, 0.002)], growing(0.001, -1e-8)) is None


# What fits, and what it costs


@pytest.mark.parametrize(
    ("bytes_a_row", "memory", "batches_"),
    [(10, 100, [1, 2, 4, 8, 10]), (10, 89, [1, 2, 4, 8]), (10, 10, [1]), (1, 64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_batches_are_doubled_until_the_memory_is_full(bytes_a_row: int, memory: int, batches_: list[int]) -> None:
    assert batches.ladder(bytes_a_row, memory) == batches_


def test_a_sequence_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence takes 10 bytes, more than the memory of 9"):
        batches.ladder(10, 9)


@pytest.mark.parametrize("steps_", [1, 2, 5, 784, 3072])
def test_a_straight_price_is_integrated_exactly(steps_: int) -> None:
    positions = batches.sampled(steps_)
    assert (positions[0], positions[-1]) == (0, steps_ - 1)
    every = [0.001 + 2e-6 * position for position in range(steps_)]
    assert batches.mean_over(positions, [every[position] for position in positions]) == pytest.approx(sum(every) / steps_)


def test_a_price_in_two_pieces_is_weighted_by_their_lengths() -> None:
    assert batches.mean_over([0, 10, 40], [1.0, 1.0, 3.0]) == pytest.approx((10 * 1 + 30 * 2) / 40)


# Waits of the readers


def test_waits_are_sorted_by_when_they_were() -> None:
    read_at = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 2.5, 4.5, 7.0]]
    assert latency.between(read_at, 0.5, 4.5) == (1.0, 2.0, 2.0)
    assert latency.overlapping(read_at, 2.2, 4.0) == (3.0, 2.0, 2.0)  # one that began before, one that ended after
    assert latency.percentile([1.0, 2.0, 3.0], 50) == 2.0


def test_streams_are_read_while_a_prompt_is_fed(decoder_bundle: Path) -> None:
    waits = latency.waits(decoder_bundle, 0.05, threads=1)
    assert len(waits.undisturbed) > 0
    assert len(waits.during) >= latency.STREAMS  # at least the one that the prompt's end fell into, of each
    assert min(waits.undisturbed + waits.during) > 0
    assert waits.prompt_s > 0


async def test_a_run_that_ends_too_early_is_not_waited_for(decoder_bundle: Path) -> None:
    async with engine.running(decoder_bundle, slots=1, threads=1) as running:
        stream = running.submit(0, max_tokens=2)
        reading = asyncio.create_task(stream.read())
        with pytest.raises(LoadtestError, match="has ended"):
            await stream.after(math.inf)
        await reading


# The loops that are timed


def test_the_step_loop_and_the_engine_are_measured(decoder_bundle: Path) -> None:
    assert steps.tokens_per_s(decoder_bundle, rows=3, seconds=0.05, threads=1) > 0
    assert steps.prefill_tokens_per_s(decoder_bundle, chunk=16, seconds=0.05, threads=1) > 0
    assert engine.tokens_per_s(decoder_bundle, rows=3, seconds=0.05, threads=1) > 0
    assert engine.texts_tokens_per_s(decoder_bundle, rows=3, new_tokens=5, threads=1) > 0
    assert engine.prefill_tokens_per_s(decoder_bundle, prompt_tokens=100, threads=1) > 0


def test_a_long_sequence_is_told_stretch_by_stretch(decoder_bundle: Path) -> None:
    told = list(steps.long_sequence(decoder_bundle, 50, threads=1, stretch=20))
    assert [(stretch.first, stretch.tokens, stretch.middle) for stretch in told] == [(0, 20, 10), (20, 20, 30), (40, 10, 45)]
    assert all(stretch.s_per_token > 0 and stretch.rss_bytes > 0 for stretch in told)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> contestants.Contestants:
    """A pair of the paper's kind."""
    return build(plan(GenerationPart.batches, shapes=(TINY_SHAPE,)), None, tmp_path_factory.mktemp("built"), lambda step: None)


def test_a_pair_differs_in_its_layers_alone(built: contestants.Contestants) -> None:
    pair = built.paper["MNIST"]
    assert contract.verify(pair.ours).source.attention == "causal_linear"
    twin = Twin(pair.twin, rows=3, capacity=20, threads=1)
    assert twin.cache_bytes == 3 * 20 * batches.twin_row_bytes(pair.twin, 1) == 3 * 20 * (2 * 16 * 4)  # k and v of D = 16
    assert batches.row_bytes(pair.ours) == 2 * 2 * 8 * (8 + 1) * 4  # twice H = 2 heads' (D_k, D_v + 1)
    assert twin.step_s(19, 0.0) > 0
    with pytest.raises(AssertionError):
        twin.step(20)


def test_the_twins_sequence_ends_with_its_cache(built: contestants.Contestants) -> None:
    told = list(Twin(built.paper["MNIST"].twin, rows=1, capacity=20, threads=1).sequence(stretch=8))
    assert [(stretch.first, stretch.tokens) for stretch in told] == [(0, 8), (8, 8), (16, 4)]


def test_throughput_is_measured_for_every_batch(built: contestants.Contestants) -> None:
    pair = built.paper["MNIST"]
    for found in (batches.ours(pair.ours, [1, 3], 0.0, threads=1), batches.twins(pair.twin, [1, 3], 20, 0.0, threads=1)):
        assert list(found) == [1, 3]
        assert min(found.values()) > 0


# Rows and their bars


@pytest.mark.parametrize(("engine_per_s", "verdict"), [(95.0, Verdict.passed), (80.0, Verdict.failed)])
def test_the_engine_is_held_against_the_bare_loop(engine_per_s: float, verdict: Verdict) -> None:
    full, _, one = made(
        GenerationPart.engine,
        {
            ("8 runs", "bare"): per_s(100.0, 100.0, 100.0),
            ("8 runs", "engine"): per_s(engine_per_s, engine_per_s, engine_per_s),
            ("1 runs", "bare"): per_s(9.0),
            ("1 runs", "engine"): per_s(6.0),
        },
    )
    assert (full.verdict, one.verdict) == (verdict, Verdict.shown)


@pytest.mark.parametrize(("service_per_s", "verdict"), [(80.0, Verdict.passed), (79.0, Verdict.failed)])
def test_the_service_is_held_against_the_engine(service_per_s: float, verdict: Verdict) -> None:
    (row,) = made(GenerationPart.service, {("streams", "engine"): per_s(100.0), ("streams", "service"): per_s(service_per_s)})
    assert row.verdict == verdict


@pytest.mark.parametrize(("engine_per_s", "verdict"), [(320.0, Verdict.passed), (319.0, Verdict.failed)])
def test_prefill_through_the_engine_is_held_against_the_best_chunk(engine_per_s: float, verdict: Verdict) -> None:
    figures: Figures = {("prefill", f"bare, {chunk}"): per_s(100.0 * (at + 1)) for at, chunk in enumerate(reversed(CHUNKS))}
    first, *others = made(GenerationPart.prefill, figures | {("prefill", "engine"): per_s(engine_per_s)})
    assert (first.verdict, first.reference) == (verdict, 400.0)
    assert "chunks of 16" in first.cells()[2]
    assert [row.figure for row in others] == [400.0, 300.0, 200.0, 100.0]


@pytest.mark.parametrize(("disturbed_s", "verdict"), [(0.030, Verdict.passed), (0.031, Verdict.failed)])
def test_streams_may_stutter_three_times_the_median(disturbed_s: float, verdict: Verdict) -> None:
    waits = {"p50_s": 0.01, "p99_s": 0.02, "prompt_s": 1.0, "disturbed_p99_s": disturbed_s}
    ratio, *told = made(GenerationPart.latency, {("latency", "engine"): [waits]})
    assert (ratio.verdict, ratio.figure) == (verdict, pytest.approx(100 * disturbed_s))
    assert [row.figure for row in told] == pytest.approx([10, 20, 1000 * disturbed_s, 1000])


@pytest.mark.parametrize(("beside_s", "verdict"), [(0.040, Verdict.passed), (0.041, Verdict.failed)])
def test_a_first_token_may_take_four_times_as_long_beside_a_request_for_all_slots(beside_s: float, verdict: Verdict) -> None:
    found = {"undisturbed": (0.005, 0.01), "disturbed": (0.02, beside_s)}
    figures = {("first token", which): [{"p50_s": p50_s, "p99_s": p99_s}] for which, (p50_s, p99_s) in found.items()}
    ratio, *told = made(GenerationPart.sharing, figures)
    assert (ratio.verdict, ratio.figure) == (verdict, pytest.approx(100 * beside_s))
    assert [row.figure for row in told] == pytest.approx([5, 10, 20, 1000 * beside_s])


@pytest.mark.parametrize(("texts_per_s", "verdict"), [(300.0, Verdict.passed), (290.0, Verdict.failed)])
def test_transformers_is_to_be_beaten_three_times(texts_per_s: float, verdict: Verdict) -> None:
    (row,) = made(GenerationPart.transformers, {("texts", "engine"): per_s(texts_per_s), ("texts", "transformers"): per_s(100.0)})
    assert row.verdict == verdict


def test_a_token_is_held_against_the_twins_at_every_length() -> None:
    twin_s = {position: 0.0009 if position == 256 else 0.002 for position in POSITIONS}
    figures: Figures = {(f"MNIST after {position}", "ours"): [{"s": 0.001}] for position in POSITIONS}
    figures |= {(f"MNIST after {position}", "twin"): [{"s": twin_s[position]}] for position in POSITIONS}
    *tokens, paper = made(GenerationPart.paper, figures)
    assert [row.verdict for row in tokens] == [Verdict.failed, *[Verdict.passed] * (len(POSITIONS) - 1)]
    assert (paper.figure, paper.reference, paper.verdict) == (1.0, 7.0, Verdict.shown)


def test_each_is_taken_at_its_own_best_batch() -> None:
    ours = {1: (10.0, 110.0), 64: (900.0, 1000.0), 128: (800.0, 900.0)}
    twin = {1: (20.0, 20.0), 8: (50.0, 50.0), 12: (40.0, 40.0)}
    figures = {
        ("MNIST batches", who): [{"batch": batch, "per_s": figure} for batch, both in found.items() for figure in both]
        for who, found in (("ours", ours), ("twin", twin))
    }
    (row,) = made(GenerationPart.batches, figures)
    assert (row.figures, row.references, row.verdict) == ((900.0, 1000.0), (50.0, 50.0), Verdict.shown)
    assert row.note == "batch 64 of 128 that fit, twin 8 of 12; paper's GPU: 19 times"


@pytest.mark.parametrize(("last_s", "verdict"), [(0.00102, Verdict.passed), (0.0011, Verdict.failed)])
def test_a_price_that_grows_is_no_flat_price(last_s: float, verdict: Verdict) -> None:
    told = [stretch(0, 0.001), stretch(99_000, last_s, rss_bytes=2**21)]
    price, memory, crossed, twin = rows(plan(GenerationPart.flat), noted({}, ours=told, twins=growing(0.0006, 1e-6)))
    assert (price.verdict, memory.figures) == (verdict, (1.0,))
    assert crossed.figures == (500.0,)  # 0.00085 up to there, 0.00135 beyond
    assert twin.figure == pytest.approx(1000 * (0.0006 + 3750e-6))
    assert twin.note == "its line: 0.600 ms + 1.000 ms a thousand tokens"


def test_what_was_left_out_is_not_measured_and_says_why() -> None:
    parts = (GenerationPart.transformers, GenerationPart.paper, GenerationPart.batches)
    told = rows(plan(*parts), noted({}, absent=dict.fromkeys(("transformers", "ours", "twin"), "torch is not installed")))
    assert {(row.verdict, row.note) for row in told} == {(Verdict.not_measured, "torch is not installed")}
    flat = rows(plan(GenerationPart.flat), noted({}, ours=[stretch(0, 0.001)], absent={"bundle's twin": NO_CHECKPOINT}))
    assert [row.note for row in flat] == ["", "", NO_CHECKPOINT, NO_CHECKPOINT]


# The command


def test_without_a_checkpoint_the_twin_and_gpt2_are_left_out(decoder_bundle: Path, tmp_path: Path) -> None:
    parts = (GenerationPart.flat, GenerationPart.transformers, GenerationPart.engine)
    built = build(plan(*parts, bundle=decoder_bundle), None, tmp_path, lambda step: None)
    assert built.left_out == {"bundle's twin": NO_CHECKPOINT, "transformers": NO_CHECKPOINT}


def test_the_checkpoint_of_another_model_is_refused(decoder_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadtestError, match="its weights differ"):
        config_of(tiny_decoder(tmp_path / "other"), contract.read_manifest(decoder_bundle))


def test_an_unknown_part_is_refused(decoder_bundle: Path) -> None:
    ended = CliRunner().invoke(app, ["--bundle", str(decoder_bundle), "--only", "nothing"])
    assert ended.exit_code == 2


def test_a_run_measures_every_part_and_ends_as_its_rows_say(decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHAPES", (TINY_SHAPE,))
    monkeypatch.setattr(command, "MEMORY_BYTES", MEMORY_BYTES)
    monkeypatch.setattr(machine, "cpus", lambda: 1)  # threads that wait for each other are slow where others work
    checkpoint = decoder_bundle.with_name(f"{decoder_bundle.name}-checkpoint")
    arguments = ["--bundle", decoder_bundle, "--checkpoint", checkpoint, "--only", ",".join(WITHOUT_SERVICE), "--out", tmp_path]
    arguments += ["--rounds", 1, "--seconds", 0.1, "--tokens", 2000, "--slots", 2]
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    (file,) = tmp_path.glob("*.json")
    told = json.loads(file.read_text())

    verdicts = {row["work"]: row["verdict"] for row in told["rows"]}
    assert ended.exit_code == ("FAIL" in verdicts.values()), ended.output  # whichever bars are missed in a tenth of a second
    expected = rows(plan(*WITHOUT_SERVICE, slots=2, shapes=(TINY_SHAPE,)), _anything())
    assert list(verdicts) == [row.work for row in expected]
    barred = [row for row in told["rows"] if row["bar"]]
    assert len(barred) == 5 + len(POSITIONS)  # engine, prefill, latency, transformers, flat, and a token at every length
    assert {row["verdict"] for row in barred} <= {"pass", "FAIL"}

    works = {(entry["work"], entry["contestant"]) for entry in told["measurements"]}
    assert {("2 runs", "bare"), ("1 runs", "engine"), ("prefill", "bare, 1024"), ("prefill", "engine"), ("latency", "engine")} <= works
    assert {("texts", "transformers"), ("texts", "engine"), ("long sequence", "bundle"), ("long sequence", "bundle's twin")} <= works
    assert ("MNIST after 3072", "twin") in works
    largest = {entry["contestant"]: entry["batch"] for entry in told["measurements"] if entry["work"] == "MNIST batches"}
    assert largest == {"ours": 28, "twin": 12}
    for picture in (file.with_suffix(".png"), file.with_name(f"{file.stem}-batches.png")):
        assert picture.read_bytes().startswith(b"\x89PNG")


def _anything() -> Measurements:
    """Figures of a run as that of the command."""
    figures: Figures = {("prefill", f"bare, {chunk}"): per_s(1.0) for chunk in CHUNKS}
    figures |= {("MNIST batches", who): [{"batch": 1, "per_s": 1.0}] for who in ("ours", "twin")}
    figures |= {("latency", "engine"): [dict.fromkeys(("p50_s", "p99_s", "disturbed_p99_s", "prompt_s"), 1.0)]}
    return noted(figures, ours=[stretch(0, 1.0), stretch(1000, 1.0)], twins=growing(0.5, 1e-3, tokens=2000))


def test_without_a_twin_there_is_still_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "price.png"
    plots.price_of_a_token([stretch(0, 0.001), stretch(1000, 0.001)], [], file, "title", state_bytes=2**20, twin_token_bytes=0)
    assert file.read_bytes().startswith(b"\x89PNG")
