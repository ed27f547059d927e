"""The runs behind the capacity page: in order, each once under its conditions, ramps until their knee is within, overload at three times
that knee; what fails holds up only what needs it, and the page has all that is there."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from PIL import Image

from loadtest.capacity import campaign, deep_encoder, tables
from loadtest.capacity.campaign import RUNS, CampaignRun, CampaignRuns
from loadtest.errors import LoadtestError
from loadtest.load.shapes import SECONDS, Shape

ABOUT = {"date": "2026-11-21T20:00:00Z", "cpus": 2, "cpu": "EPYC", "memory_bytes": 2**34, "commit": "0123456789abc"}


class Load:
    """In the place of `attnserve load`: writes run.json with the knees it is told, and remembers how it was called. `broken` names the
    runs that end with 2."""

    def __init__(self, *knees: dict[str, Any] | None) -> None:
        self.knees = list(knees)
        self.calls: list[dict[str, str]] = []
        self.on: list[frozenset[int]] = []
        self.broken: set[str] = set()

    def __call__(self, command: list[str]) -> int:
        words = command[3:]
        given = dict(zip(words[::2], words[1::2], strict=True))
        self.calls.append(given)
        self.on.append(campaign.cores())
        out = Path(given["--out"])
        if out.name in self.broken:
            return 2
        rate = float(given.get("--knee", 100))
        knee = self.knees.pop(0) if self.knees else {"rate": rate, "reached": True}
        folder = out / f"2026-{given['--shape']}"
        folder.mkdir(parents=True)
        run = {**ABOUT, "shape": given["--shape"], "plan": {"rate": rate}, "marks": [], "knee": knee, "flatness": []}
        (folder / "run.json").write_text(json.dumps(run))
        return 0

    @property
    def runs(self) -> list[str]:
        return [Path(each["--out"]).name for each in self.calls]


class Service:
    """In the place of `attnserve serve`: remembers the encoder and the cores of each start."""

    def __init__(self) -> None:
        self.on: list[frozenset[int]] = []
        self.encoders: list[str] = []

    @contextmanager
    def __call__(self, encoder: Path, *_: object, **__: object) -> Iterator[Any]:
        self.on.append(campaign.cores())
        self.encoders.append(encoder.name)
        yield SimpleNamespace(address="http://127.0.0.1:1")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    made = Load()
    monkeypatch.setattr(campaign, "exit_status_of", made)
    return made


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(campaign, "attnserve", made)
    monkeypatch.setattr(campaign.contract, "verify", lambda bundle: SimpleNamespace(name=bundle.name, fingerprint=f"of {bundle.name}"))
    return made


@pytest.fixture
def runs(tmp_path: Path, load: Load, service: Service) -> CampaignRuns:
    return CampaignRuns(tmp_path, Path("encoder"), Path("decoder"), 1.0)


def step(name: str) -> CampaignRun:
    return next(each for each in RUNS if each.name == name)


EVERYTHING, CROWD = step("everything"), step("crowd")


def test_a_ramp_is_repeated_until_its_knee_is_within(runs: CampaignRuns, load: Load, tmp_path: Path):
    load.knees = [None, {"rate": 40, "reached": False}, {"rate": 55, "reached": True}]
    assert runs.make([EVERYTHING]) == {}
    assert [each.get("--knee") for each in load.calls] == [None, "40.0", "60.0"]
    assert len({each["--seed"] for each in load.calls}) == 3, "else the service's cache would answer"
    assert runs.conditions(CROWD)["knee"] == 55
    assert len(list((tmp_path / "everything").glob("*/run.json"))) == 1, "of the other two nothing is left"


def test_a_ramp_with_a_late_generator_at_its_knee_is_repeated_as_it_was(runs: CampaignRuns, load: Load):
    load.knees = [{"rate": 40, "reached": True, "late_ms": 252.0}, {"rate": 55, "reached": True, "late_ms": None}]
    assert runs.make([EVERYTHING]) == {}
    assert [each.get("--knee") for each in load.calls] == [None, "100.0"]
    assert runs.conditions(CROWD)["knee"] == 55


def test_a_ramp_that_never_has_its_knee_within_is_an_error(runs: CampaignRuns, load: Load):
    load.knees = [None] * 4
    with pytest.raises(LoadtestError, match="none of 4 ramps has a valid knee within it"):
        runs.perform(EVERYTHING, "http://x")


def test_a_run_goes_by_the_knee_of_its_ramp(runs: CampaignRuns, load: Load):
    load.knees = [{"rate": 55, "reached": True}]
    assert runs.make([EVERYTHING, CROWD]) == {}
    assert load.calls[1]["--knee"] == "55.0"
    assert load.calls[1]["--minutes"] == str(SECONDS[Shape.crowd] / 60)


def test_a_failure_holds_up_only_what_needs_it(runs: CampaignRuns, load: Load, service: Service):
    load.broken = {"everything"}
    failed = runs.make([step("embed-14"), EVERYTHING, CROWD, step("embed-apart")])
    assert load.runs == ["embed-14", "everything", "embed-apart"]
    assert failed["everything"] == "everything could not be measured: attnserve load ended with 2"
    assert failed["crowd"] == "crowd needs the knee of everything, which was not measured"
    assert list(failed) == ["everything", "crowd"]
    assert len(service.on) == 3, "after a failure the service is started anew"


def test_a_service_that_does_not_start_is_the_failure_of_a_run(runs: CampaignRuns, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> Any:
        raise LoadtestError("did not become ready")

    monkeypatch.setattr(campaign, "attnserve", broken)
    assert runs.make([EVERYTHING]) == {"everything": "did not become ready"}


def test_a_run_is_kept_only_under_the_same_conditions(runs: CampaignRuns, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs.make([EVERYTHING, CROWD])
    runs.make([EVERYTHING, CROWD])
    assert load.runs == ["everything", "crowd"], "as they were"
    shorter = CampaignRuns(tmp_path, Path("encoder"), Path("decoder"), 0.5)
    assert shorter.found(EVERYTHING) is None
    shorter.make([EVERYTHING])
    assert "run again, under other conditions: minutes was 2.5" in capsys.readouterr().err.replace("\n", " ")
    assert CampaignRuns(tmp_path, Path("another"), Path("decoder"), 0.5).found(EVERYTHING) is None
    load.knees = [{"rate": 7, "reached": True}]
    (tmp_path / "everything" / "conditions.json").unlink()
    assert runs.found(EVERYTHING) is None, "nothing is known of it"
    runs.make([EVERYTHING])
    assert runs.found(CROWD) is None, "it went by another knee"


def test_service_and_generator_of_an_overload_have_cores_of_their_own(runs: CampaignRuns, load: Load, service: Service):
    mine = campaign.cores()
    if len(mine) < 2:
        pytest.skip("one core cannot be shared out")
    runs.make([EVERYTHING, step("embed-apart"), step("overload-embed")])
    assert service.on[0] == load.on[0] == mine
    assert not service.on[1] & load.on[1], "neither takes the other's"
    assert service.on[1] | load.on[1] == mine
    assert campaign.cores() == mine


def test_deep_runs_are_of_the_deeper_encoder(runs: CampaignRuns, service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(campaign, "deep_encoder", lambda encoder, folder: Path("deeper"))
    assert runs.make([step("embed-14"), step("deep-14"), step("deep-120")]) == {}
    assert service.encoders == ["encoder", "deeper"]


def test_the_page_has_every_run_that_is_there_also_when_one_fails(
    load: Load, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tables, "tables_of", lambda runs, absent: " ".join(tables.name(run) for run in runs))
    (page := tmp_path / "page.md").write_text(f"{tables.BEGIN}\nold\n{tables.END}\n")
    given: dict[str, Any] = {"encoder": Path("e"), "decoder": Path("d"), "minutes_scale": 1.0, "page": page, "out": tmp_path / "out"}
    campaign.campaign(only="embed-14", **given)
    load.broken = {"crowd"}
    with pytest.raises(typer.Exit):
        campaign.campaign(only="crowd", **given)
    assert page.read_text() == f"{tables.BEGIN}\n\nembed-14 everything\n\n{tables.END}\n"
    assert "crowd failed: crowd could not be measured" in capsys.readouterr().err


def test_a_page_without_a_place_is_refused_before_anything_runs(load: Load, service: Service, tmp_path: Path):
    (page := tmp_path / "page.md").write_text("nothing")
    with pytest.raises(LoadtestError, match="lacks the lines"):
        campaign.campaign(encoder=Path("e"), decoder=Path("d"), only="", minutes_scale=1.0, page=page, out=tmp_path)
    assert load.calls == []


def test_a_command_ends_with_its_status():
    assert campaign.exit_status_of([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(typer.BadParameter, match="knees is not a run; choose from: embed-14"):
        campaign.chosen("knees")
    assert [step.name for step in campaign.chosen("")] == [step.name for step in RUNS]


def test_every_ramp_comes_before_the_runs_that_need_it():
    names = [step.name for step in RUNS]
    assert all(names.index(step.knee_of) < names.index(step.name) for step in RUNS if step.knee_of)


def test_runs_of_any_shape_are_a_page(tmp_path: Path):
    """Head line, what grew in the soak, pass marks, and the pictures beside the page."""
    marks = [{"stage": "run", "figure": "recovery_s", "at_most": 5.0, "why": "so", "value": 1.0, "verdict": "pass", "changed": "then: so"}]
    marks.append({"stage": "soak", "figure": "embed.error_share", "at_least": 1.0, "why": "so", "value": None, "verdict": "not measured"})
    grew = {"what": "replica (7) rss", "unit": "MiB", "begin": 100.0, "end": 112.0, "growth": 12.0, "flat": False}
    file = tmp_path / "soak" / "2026" / "run.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**ABOUT, "shape": "soak", "marks": marks, "flatness": [grew]}))
    made = tables.tables_of([file])
    assert "**Not run**: streams-apart, overload-streams." in tables.tables_of([file], ["streams-apart", "overload-streams"])
    assert made.startswith("1 runs on 2 x EPYC, 16 GiB; commit `012345678`; 2026-11-21.")
    assert "| replica (7) rss | MiB | 100 | 112 | 12.0 | GREW |" in made
    assert "| soak | run: recovery_s | 1.00 | at most 5 | pass | 2026-11-21 | then: so |" in made
    assert "| soak | soak: embed.error_share | not measured | at least 1 | not measured | 2026-11-21 |  |" in made
    assert tables.pictures([file], tmp_path / "page.md") == ""
    Image.new("RGB", (20, 10)).save(file.with_name("processes.png"))
    assert "(page-soak.png)" in tables.pictures([file], tmp_path / "page.md")
    with Image.open(tmp_path / "page-soak.png") as copy:
        assert copy.size == (20, 10)


def test_the_deeper_encoder_is_exported_once_with_the_tokenizer_of_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def export(command: list[str], **_: object) -> Any:
        commands.append(command)
        Path(command[command.index("--out") + 1]).mkdir()
        return SimpleNamespace(returncode=len(commands) - 1, stdout="", stderr="no room")

    monkeypatch.setattr(deep_encoder.subprocess, "run", export)
    bundle = deep_encoder.deep_encoder(tmp_path / "encoder", tmp_path / "of")
    assert deep_encoder.deep_encoder(tmp_path / "encoder", tmp_path / "of") == bundle
    assert len(commands) == 1
    described = json.loads(Path(commands[0][commands[0].index("--config") + 1]).read_text())
    assert described["tokenizer"] == str(tmp_path / "encoder")
    with pytest.raises(LoadtestError, match="encoder-12-layers could not be exported: no room"):
        deep_encoder.deep_encoder(tmp_path / "encoder", tmp_path / "another")
