"""`attnserve bench`: its parts as data, the runner on made-up sides, and the parts that need no service, on tiny bundles. No speed is
judged here."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.bench import command, encoder, long, overhead, split
from loadtest.bench.parts import PARTS
from loadtest.common import wrk
from loadtest.common.benchmark import Benchmark, Figure, Plan, Side, judge, run
from loadtest.common.report import Bar, Row, Verdict
from loadtest.errors import LoadtestError
from loadtest.in_process import engine, retrieval, steps


def plan(part: str, *bundles: Path, folder: Path = Path("/tmp"), seconds: float = 0.02, **options: str) -> Plan:
    return Plan(bundles=bundles, seconds=seconds, options={**PARTS[part].options, **options}, folder=folder, stack=ExitStack())


# The command ----------------------------------------------------------------------------------------------------------------------------


def test_the_list_has_a_line_for_each_part_with_its_options() -> None:
    ended = CliRunner().invoke(command.app, ["--list"])
    assert [line.split()[0] for line in ended.output.splitlines()] == list(PARTS)
    assert "--set what=kill, count=100" in ended.output


def test_each_part_has_a_module_with_its_benchmark() -> None:
    assert all(callable(import_module(part.module).benchmark) for part in PARTS.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["encoders"], "choose from encoder, overhead"), (["split", "--set", "encoder=2"], "takes encoders, generators")],
)
def test_what_does_not_exist_is_refused_with_the_choices(arguments: list[str], words: str) -> None:
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(command.app, arguments)
    assert ended.exit_code == 2
    assert words in ended.output


def test_a_part_writes_its_table_and_every_figure(encoder_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(long, "LENGTHS", (8, 16))
    asked = ["long", *("--bundle", str(encoder_bundle)) * 2, "--rounds", "2", "--seconds", "0.02", "--out", str(tmp_path)]
    ended = CliRunner().invoke(command.app, asked, catch_exceptions=False)
    assert ended.exit_code == 1, "the same bundle is not 4.5 times as fast as itself"
    (file,) = tmp_path.glob("long/*.json")
    found = json.loads(file.read_text())
    assert [(row["work"], len(row["figures"])) for row in found["rows"]] == [("one text of 8 tokens", 2), ("one text of 16 tokens", 2)]
    assert found["plan"]["rounds"] == 2
    assert "| one text of 16 tokens |" in file.with_suffix(".md").read_text()
    assert CliRunner().invoke(command.app, [*asked, "--only", "widths"]).exit_code == 2


# The runner -----------------------------------------------------------------------------------------------------------------------------

ROW = Row("work", "x/s", ("ours", "rate"), ("theirs", "rate"), Bar(at_least=0.9, reference="theirs"))


def sides(rate: float | Figure, **theirs: Any) -> list[Side]:
    return [Side("ours", {"a": lambda _: {"rate": rate}}), Side("theirs", {"a": lambda _: {"rate": 100.0}}, **theirs)]


def test_sides_are_measured_in_turns() -> None:
    seen: list[str] = []
    run(Benchmark(sides(95.0), [ROW]), 2, (), seen.append)
    assert [label for label in seen if "starting" not in label] == [f"round {n}/2: {who}, a" for n in (1, 2) for who in ("ours", "theirs")]


@pytest.mark.parametrize(
    ("rate", "verdict"), [(95.0, Verdict.passed), (80.0, Verdict.failed), (Figure(95.0, problem="3 timeouts"), Verdict.invalid)]
)
def test_a_row_is_judged_by_its_bar_and_the_problems_of_its_measurements(rate: float | Figure, verdict: Verdict) -> None:
    made = Benchmark(sides(rate), [ROW])
    (row,) = judge(made, run(made, 2, ()), ())
    assert (row.verdict, len(row.figures), row.references) == (verdict, 2, (100.0, 100.0))
    assert ("ours: 3 timeouts" in row.note) == (verdict is Verdict.invalid)


def test_a_side_that_is_optional_may_be_absent_with_a_reason() -> None:
    def fails() -> Any:
        raise LoadtestError("not installed")

    made = Benchmark(sides(95.0, start=fails, optional=True), [ROW])
    (row,) = judge(made, run(made, 2, ()), ())
    assert (row.verdict, row.note) == (Verdict.not_measured, "not installed")
    with pytest.raises(LoadtestError, match="not installed"):
        run(Benchmark(sides(95.0, start=fails), [ROW]), 1, ())


def test_only_chosen_steps_are_measured_and_the_last_round_has_what_is_measured_once() -> None:
    rounds: list[str] = []
    side = Side("ours", {"a": lambda _: {"rate": 1.0}, "b": lambda _: {"other": 1.0}})
    once = Side("once", {"a": lambda _: rounds.append("once") or {}})  # type: ignore[func-returns-value]
    made = Benchmark([side, Side("once", once.steps, once=True)], [ROW, Row("other", "", ("ours", "other"))])
    measured = run(made, 3, ["a"])
    assert list(measured.figures) == [("ours", "rate")]
    assert [row.work for row in judge(made, measured, ["a"])] == ["work"]
    assert rounds == ["once"]


# Parts ----------------------------------------------------------------------------------------------------------------------------------


def keys(made: Benchmark, *, but: Sequence[str] = ()) -> set[tuple[str, str]]:
    return {key for row in made.rows for key in (row.key, row.reference_key) if key and key[0] not in but}


def test_the_engine_and_the_bare_loop_have_every_figure_of_text(decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LONG_PROMPT", 200)
    made = import_module("loadtest.bench.generate").benchmark(plan("generate", decoder_bundle, slots="2"))
    monkeypatch.setattr(import_module("loadtest.bench.generate"), "PROMPT_TOKENS", 200)
    measured = run(Benchmark(made.sides[:1], made.rows), 1, ())
    assert {key for key in measured.figures if measured.figures[key][0].value > 0} == keys(made, but=["service"])


def test_waits_that_overlap_a_time_are_those_of_its_readers() -> None:
    read_at = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 2.5, 4.5, 7.0]]
    assert engine.overlapping(read_at, 2.2, 4.0) == [3.0, 2.0, 2.0]  # one that began before, one that ended after


def test_a_step_is_timed_at_any_position(decoder_bundle: Path) -> None:
    assert steps.step_s(decoder_bundle, 1, 0.01, position=100_000) > 0


def test_the_graphs_for_gpus_run_through_on_a_cpu(gpu_bundle: Path, tmp_path: Path) -> None:
    from loadtest.in_process import gpu

    made = gpu.benchmark(plan("gpu", gpu_bundle, folder=tmp_path, provider="cpu", texts="1x8,3x64"))
    measured = run(made, 1, ["encoder"])
    assert measured.figures["encoder", "loss"][0].value < 0.001
    assert "7 LayerNormalization" in measured.figures["encoder", "loss"][0].note
    assert set(measured.figures) == keys(made, but=["HTTP"])
    with pytest.raises(LoadtestError, match="provider=tpu: choose from cuda, cpu"):
        gpu.benchmark(plan("gpu", gpu_bundle, provider="tpu"))


def test_a_bundle_without_a_graph_for_gpus_is_refused(decoder_bundle: Path) -> None:
    from loadtest.in_process import gpu

    with pytest.raises(LoadtestError, match=r"has no graph for GPUs: export it with `attnserve export --gpu`"):
        gpu.benchmark(plan("gpu", decoder_bundle, provider="cpu"))


def test_a_bundle_of_another_kind_is_refused(decoder_bundle: Path) -> None:
    with pytest.raises(LoadtestError, match="is of kind decoder, but this part measures a bundle of kind encoder"):
        encoder.benchmark(plan("encoder", decoder_bundle))


def test_the_parts_of_the_encoder_have_a_figure_for_each_row(encoder_bundle: Path) -> None:
    """The bare runtime is measured; the service's figures are named as the rows name them."""
    made = encoder.benchmark(plan("encoder", encoder_bundle))
    assert "make peers" in made.absent["infinity"]
    measured = run(Benchmark(made.sides[:1], made.rows), 1, ())
    assert {key for key in keys(made) if key[0] == "bare"} <= set(measured.figures)


def test_bundles_of_short_texts_are_refused(encoder_bundle: Path) -> None:
    with pytest.raises(LoadtestError, match="up to 64 tokens, but the shortest measured length is 512"):
        long.benchmark(plan("long", encoder_bundle, encoder_bundle))


@pytest.mark.parametrize("form", overhead.FORMS, ids=lambda form: form.name)
def test_no_input_is_sent_twice(form: overhead.Form) -> None:
    bodies = [json.loads(body) for body in form.bodies("mini", 20, "seed")]
    if form.stream:
        inputs = [body["prompt"] for body in bodies]
    else:
        assert {body["encoding_format"] for body in bodies} == {form.encoding}
        inputs = [str(each) for body in bodies for each in (body["input"] if form.inputs > 1 else [body["input"]])]
    assert len(inputs) == len(set(inputs)) == 20 * form.inputs


def test_both_profiles_get_the_same_kind_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Sequence[str]]] = []

    def load(url: str, bodies: Sequence[str], *, connections: int, seconds: float) -> SimpleNamespace:
        sent.append((url, bodies))
        return SimpleNamespace(per_s=10.0 * connections, p50_ms=3.0, problems=["3 timeouts"] * (connections == 1))

    monkeypatch.setattr(wrk, "run", load)
    server: Any = SimpleNamespace(url="http://x", path="/v1/embeddings", model="mini")
    figures = split.figures_of(server, "poet", 1, "round 1")
    assert figures == {split.RATE: Figure(320.0), split.P50: Figure(3.0, problem="3 timeouts"), split.TOKENS: Figure(160.0 * 64)}
    bodies = [body for _, some in sent for body in some]
    assert len(set(bodies)) == len(bodies)


def test_the_steps_of_search_measure_what_their_names_say(encoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny encoder with dense vectors only: a step without a bundle for it is absent with its reason."""
    for name, value in (("LONG_CHARACTERS", 3_000), ("LONG_TOKENS", 64), ("TEXTS", 2), ("DOCUMENTS", 3)):
        monkeypatch.setattr(retrieval, name, value)
    made = retrieval.benchmark(plan("retrieval", encoder_bundle))
    measured = run(made, 1, ["maxsim", "cut", "chunks"])
    assert set(measured.figures) == {
        *((retrieval.SERVICE, name) for name in ("maxsim", "short", "long")),
        *((side, "chunks") for side in ("late", "windows")),
    }
    assert "--set splade=FOLDER" in measured.absent[retrieval.PEER]
