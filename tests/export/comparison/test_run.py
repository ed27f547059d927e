"""A whole comparison on tiny sizes: measured once, stopped and taken up again, and written as a page."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.comparison import growth, layer_graph, page, run
from export.comparison.growth import Point
from export.comparison.mechanisms import EVERYTHING, build
from export.comparison.run import ComparisonPlan, Result
from export.errors import ExportError
from service.cli import app

NAMES = ("softmax", "recurrent", "causal_linear")
PLAN = ComparisonPlan(
    d_model=8,
    n_heads=2,
    lengths=(8, 16, 32),
    parity_sizes=((1, 1), (2, 5)),
    rank_length=9,
    rank_widths=(2, 4),
    width_length=32,
    seconds=1e-4,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped by Ctrl-C at the second length of the second mechanism, and then run to its end. One export a mechanism, for all tests."""
    out = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "measure", interrupted(growth.measure))
        with pytest.raises(KeyboardInterrupt):
            run.run(NAMES, PLAN, out)
    half = run.load(out / run.RESULTS, "recurrent", PLAN)
    assert [point.N for point in half.points] == [8]
    assert not half.complete
    run.run(NAMES, PLAN, out)
    return out


def interrupted(measure):
    def once(graph: Path, N: int, **sizes: float) -> Point:
        if graph.name.startswith("recurrent.") and N == 16:
            raise KeyboardInterrupt
        return measure(graph, N, **sizes)

    return once


@pytest.fixture
def found(out: Path) -> dict[str, Result]:
    return {name: run.load(out / run.RESULTS, name, PLAN) for name in NAMES}


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def never(*arguments: object, **keywords: object) -> None:
        raise AssertionError("measured again")

    for module, name in ((growth, "measure"), (layer_graph, "write"), (layer_graph, "difference")):
        monkeypatch.setattr(module, name, never)
    return


@pytest.mark.usefixtures("nothing_is_measured")
def test_what_is_measured_is_not_measured_again(out: Path, found: dict[str, Result]) -> None:
    assert {result.name: result for result in run.run(NAMES, PLAN, out)} == found


def test_another_plan_begins_anew(out: Path) -> None:
    other = PLAN.model_copy(update={"n_heads": 4})
    assert run.load(out / run.RESULTS, "softmax", other).points == []


def test_onnxruntime_gives_what_torch_gives(found: dict[str, Result]) -> None:
    assert all(result.error is not None and result.error <= layer_graph.BAR for result in found.values())


def test_a_length_at_which_the_system_kills_the_run_ends_the_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    run.run(("causal_linear",), PLAN, tmp_path)
    found = run.load(tmp_path / run.RESULTS, "causal_linear", PLAN)
    assert (found.points, found.ended) == ([], "the system killed the run at N=8, probably because it used too much memory")


@pytest.mark.parametrize("name", [name for name, layer in EVERYTHING.items() if layer.examples.varied])
def test_values_of_the_other_letters_are_what_layers_take(name: str) -> None:
    option, values = EVERYTHING[name].examples.varied
    for value in values:
        build(name, 8, 2, longest=64, more={option: value})


def test_the_page_has_every_mechanism_and_every_picture(found: dict[str, Result], tmp_path: Path) -> None:
    text = page.write(found, PLAN, tmp_path).read_text()
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"compare.md", "compare-time.svg", "compare-memory.svg", "compare-ranks.svg"}
    assert all(f"]({name})" in text for name in names - {"compare.md"})
    assert all(text.count(f"\n| `{name}` |") == 2 for name in NAMES)  # of growth and of abilities
    assert "Not finished" not in text
    assert "| self-attention | O(N² D) |" in text
    assert "| yes | chunk | 0.2 KiB, however long |" in text


def test_a_mechanism_that_fails_says_why_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_graph(layer: object, file: Path, **keywords: object) -> None:
        raise ValueError("no such operator\nand a long trace")

    monkeypatch.setattr(layer_graph, "write", no_graph)
    failed = run.run(("softmax", "linear"), PLAN, tmp_path)
    assert [result.failure for result in failed] == ["ValueError: no such operator"] * 2
    assert not any(result.complete for result in failed)
    written = page.markdown({result.name: result for result in failed}, PLAN, tmp_path)
    assert "**Not finished**: `softmax` (ValueError: no such operator); `linear`" in written


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["compare", "--only", "hydra", "--out", str(tmp_path)])
    assert isinstance(refused.exception, ExportError)
    assert "'hydra' is not a mechanism" in str(refused.exception)
