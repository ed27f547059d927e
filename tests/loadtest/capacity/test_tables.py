"""A ramp's file becomes the tables of the capacity page, and the page keeps the rest of itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.capacity import tables
from loadtest.errors import LoadtestError
from loadtest.load import figures, knee
from loadtest.load.plan import LoadPlan, stages
from loadtest.load.shapes import Shape
from tests.loadtest.load.made_up import begun, every, late, steps

CORES = {"haproxy": 0.02, "ray::ServeReplica": 1.0, "raylet": 0.0}


def ramp(folder: Path, **more: object) -> Path:
    """Two steps of 10 and 20 requests a second, the second too slow: the knee is the first."""
    samples = [*every(0.1, 1000.0, 110, ms=10), *every(0.05, 1011.0, 220, ms=100)]
    found = [step.model_copy(update={"cores": CORES}) for step in figures.by_stage(samples, begun(("x0.5", 0.5, 11), ("x1", 1.0, 11)))]
    at = knee.knee(found)
    assert at is not None
    plan = LoadPlan(
        url="http://127.0.0.1:1",
        out=folder,
        seed=0,
        open_loop=True,
        rate=20,
        mix={"embed": 1},
        models={"embed": "minilm", "complete": "decoder"},
        stages=stages(Shape.ramp, 100),
        words=16,
    )
    content = {
        "cpus": 2,
        "cpu": "AMD EPYC (avx2)",
        "date": "2026-11-21T20:00:00Z",
        "commit": "0123456789abcdef",
        "plan": plan.model_dump(mode="json"),
        "stages": [step.model_dump() for step in found],
        "knee": {"rate": at.rate, "stage": at.stage.name, "reached": at.reached},
        **more,
    }
    (file := folder / "run.json").write_text(json.dumps(content))
    return file


def test_a_ramp_becomes_tables(tmp_path: Path):
    (folder := tmp_path / "embed-16" / "2026").mkdir(parents=True)
    made = tables.tables([tables.read(ramp(folder))])
    figures = "10.0 | 120 | 9.80 | 118 | 102 | 10.0 | 10.0 | 0.10"
    assert f"| embed-16 | minilm: embed, 16 words | {figures} | 2 x AMD EPYC, 2026-11-21, 012345678 |" in made
    assert "| embed-16 | ray::ServeReplica | 0.000 | 100.000 |" in made
    assert "raylet" not in made


def test_what_a_process_always_takes_is_told_from_what_a_request_costs(tmp_path: Path):
    """0.1 cores and 5 core-ms a request, at 10 and at 20 requests a second."""
    read = tables.read(ramp(tmp_path))
    steps = [
        step.model_copy(update={"cores": {"replica": 0.1 + 0.005 * step.all.answered_per_s, "raylet": 0.02, "idle": 0.0}})
        for step in read.steps
    ]
    found = tables.process_costs(replace(read, steps=steps, knee=knee.Knee(steps[1], True)))
    assert [part.name for part in found] == ["replica", "raylet"]
    assert found[0][1:] == pytest.approx((0.1, 5.0))
    assert found[1][1:] == pytest.approx((0.02, 0.0), abs=1e-9)


def test_the_same_requests_to_two_models_stand_beside_each_other(tmp_path: Path):
    read = []
    for name, model, more in (("embed-16", "minilm", 1), ("deep-16", "deeper", 2)):
        (folder := tmp_path / name / "2026").mkdir(parents=True)
        found = tables.read(ramp(folder))
        stage = found.knee.stage.model_copy(update={"cores": {"replica": 0.1 * more}})
        plan = found.plan.model_copy(update={"models": {"embed": model}})
        read.append(replace(found, plan=plan, knee=knee.Knee(stage, True)))
    (made,) = tables.models(read)
    assert "| embed-16 | minilm: embed, 16 words | 10.0 | 10.0 | 1.00 |" in made
    assert "| deep-16 | deeper: embed, 16 words | 10.0 | 20.0 | 2.00 |" in made
    assert tables.models(read[:1]) == []


def test_a_page_keeps_what_is_not_measured(tmp_path: Path):
    page = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    assert tables.page_with(page, "new") == f"before\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nafter\n"
    with pytest.raises(LoadtestError, match="lacks the lines"):
        tables.page_with("a page", "new")


def test_the_page_of_this_repository_has_a_place_for_tables():
    page = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text()
    assert "new" in tables.page_with(page, "new")


def test_what_is_no_ramp_is_refused(tmp_path: Path):
    with pytest.raises(LoadtestError, match=r"is not a run\.json"):
        tables.read(tmp_path / "nothing.json")
    with pytest.raises(LoadtestError, match="lower --knee"):
        tables.read(ramp(tmp_path, stages=[step.model_dump() for step in steps((10, 50), (10, 0))]))


def test_a_knee_at_which_the_generator_was_late_is_no_figure_of_the_page(tmp_path: Path):
    """By the rule of today, whatever the file of an earlier run says of its knee."""
    found = late(steps((10, 0), (20, 0), (900, 0)), "x3", 252.0)
    file = ramp(tmp_path, stages=[step.model_dump() for step in found], knee={"rate": 9.8, "stage": "x2", "reached": True})
    made = tables.tables([tables.read(file)])
    assert ", knee not judged (generator 252 ms late) |" in made
