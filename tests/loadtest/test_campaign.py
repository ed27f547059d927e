"""The runs behind the capacity page: in order, each once, ramps until their knee is within, overload at three times that knee."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from loadtest import campaign, capacity
from loadtest.campaign import STEPS, Step
from loadtest.errors import LoadtestError
from loadtest.load.shapes import Shape


class Load:
    """In the place of `attnserve load`: writes run.json with the knees it is told, and remembers how it was called."""

    def __init__(self, *knees: dict[str, Any] | None) -> None:
        self.knees = list(knees)
        self.calls: list[dict[str, str]] = []
        self.on: list[frozenset[int]] = []

    def __call__(self, command: list[str], check: bool) -> Any:
        words = command[3:]
        given = dict(zip(words[::2], words[1::2], strict=True))
        self.calls.append(given)
        self.on.append(campaign.cores())
        rate = float(given.get("--knee", 100))
        knee = self.knees.pop(0) if self.knees else {"rate": rate, "reached": True}
        folder = Path(given["--out"]) / f"2026-{given['--shape']}"
        folder.mkdir(parents=True)
        run = {"shape": given["--shape"], "date": "2026-11-21T20:00:00Z", "plan": {"rate": rate}, "marks": [], "knee": knee}
        (folder / "run.json").write_text(json.dumps(run))
        return SimpleNamespace(returncode=0)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    made = Load()
    monkeypatch.setattr(subprocess, "run", made)
    return made


RAMP = Step("ramp", Shape.ramp, ("--mix", "embed=1"))


def test_a_ramp_is_repeated_until_its_knee_is_within(load: Load, tmp_path: Path):
    load.knees = [None, {"rate": 40, "reached": False}, {"rate": 55, "reached": True}]
    campaign.perform(RAMP, "http://x", tmp_path, 1.0)
    assert [each.get("--knee") for each in load.calls] == [None, "40.0", "60.0"]
    assert campaign.knee_rate(tmp_path / "ramp") == 55
    assert len(list((tmp_path / "ramp").iterdir())) == 1, "of the other two nothing is left"


def test_a_ramp_that_never_has_its_knee_within_is_an_error(load: Load, tmp_path: Path):
    load.knees = [None] * 4
    with pytest.raises(LoadtestError, match="no knee within after 4 ramps"):
        campaign.perform(RAMP, "http://x", tmp_path, 1.0)


def test_overload_is_of_the_knee_of_its_ramp(load: Load, tmp_path: Path):
    load.knees = [{"rate": 55, "reached": True}]
    campaign.perform(RAMP, "http://x", tmp_path, 1.0)
    campaign.perform(Step("overload", Shape.overload, knee_of="ramp"), "http://x", tmp_path, 0.5)
    assert load.calls[1]["--knee"] == "55.0"
    assert load.calls[1]["--minutes"] == "0.5"


def test_a_load_that_does_not_measure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda command, check: SimpleNamespace(returncode=2))
    with pytest.raises(LoadtestError, match="ramp could not be measured: attnserve load ended with 2"):
        campaign.perform(RAMP, "http://x", tmp_path, 1.0)


def test_runs_that_are_there_are_not_repeated_and_overload_has_cores_of_its_own(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    service: list[frozenset[int]] = []

    @contextmanager
    def attnserve(*_: object, **__: object) -> Iterator[Any]:
        service.append(campaign.cores())
        yield SimpleNamespace(port=1)

    mine = campaign.cores()
    monkeypatch.setattr(campaign, "attnserve", attnserve)
    monkeypatch.setattr(campaign.contract, "verify", lambda bundle: SimpleNamespace(name="minilm"))
    monkeypatch.setattr(capacity, "tables_of", lambda runs: f"{len(runs)} runs")
    given: dict[str, Any] = {"encoder": tmp_path, "decoder": tmp_path, "minutes_scale": 1.0, "page": None, "out": tmp_path / "out"}
    campaign.campaign(only="crowd", **given)
    assert [each["--shape"] for each in load.calls] == ["ramp", "crowd"], "a run brings the ramp that its rate is of"
    assert service == load.on[:1] == [mine]
    campaign.campaign(only="crowd", **given)
    assert len(load.calls) == 2
    if len(mine) > 1:
        campaign.campaign(only="crowd,overload-embed", **given)
        assert [each["--shape"] for each in load.calls[2:]] == ["ramp", "overload"]
        assert not service[1] & load.on[2], "neither takes the other's"
        assert service[1] | load.on[2] == mine
    assert campaign.cores() == mine
    assert capsys.readouterr().out.endswith("runs\n")


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(typer.BadParameter, match="knees is no run; there are: embed-14"):
        campaign.chosen("knees")
    assert [step.name for step in campaign.chosen("")] == [step.name for step in STEPS]


def test_every_ramp_comes_before_the_runs_that_need_it():
    names = [step.name for step in STEPS]
    assert all(names.index(step.knee_of) < names.index(step.name) for step in STEPS if step.knee_of)


def test_pass_marks_of_any_run_are_a_table(tmp_path: Path):
    marks = [{"stage": "run", "figure": "recovery_s", "at_most": 5.0, "why": "so", "value": 1.0, "verdict": "pass"}]
    marks.append({"stage": "soak", "figure": "all.error_share", "at_least": 1.0, "why": "so", "value": None, "verdict": "not measured"})
    file = tmp_path / "soak" / "2026" / "run.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"shape": "soak", "date": "2026-11-21T20:00:00Z", "marks": marks}))
    made = capacity.tables_of([file])
    assert "| soak | run: recovery_s | 1.00 | at most 5 | pass | 2026-11-21 |" in made
    assert "| soak | soak: all.error_share | not measured | at least 1 | not measured | 2026-11-21 |" in made
