"""How failures of a run with faults are told apart. The run itself needs a quiet machine; `tests/cluster/` has its events."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.faults import changes, cluster
from loadtest.load import locust_run, samples
from loadtest.load.plan import DRAIN, LoadPlan, Stage
from loadtest.load.shapes import WARM_UP
from tests.loadtest.load.made_up import begun, every, sample
from tests.service.fakes import PATIENCE_S

GOOD = every(0.5, 1000.0, 20)
GONE = "the stream broke: {'message': 'the replica that worked on the request is gone: send the request again'}"


def seen(stage: str, *bad: object) -> changes.StageOutcome:
    """A stage of ten seconds with good requests and `bad` ones."""
    (told,) = changes.stages_of([*GOOD, *bad], begun((stage, 0.5, 10.0)), {stage: 3.0})
    return told


def stream(**more: object) -> object:
    return sample(1004.0, kind="completion", **{"first_ms": 5.0, **more})


def test_a_stage_without_failures_has_none() -> None:
    told = seen("rolling update")
    assert (told.cut, told.failed, told.problems, told.took_s) == (0, 0, {}, 3.0)


def test_a_stream_that_the_dead_node_had_begun_is_no_failure() -> None:
    told = seen("node killed", stream(problem=GONE), stream(problem="the stream ended without [DONE]"))
    assert (told.cut, told.failed) == (2, 0)
    assert told.as_json()["problems"] == {f"completion 200: {GONE}": 1, "completion 200: the stream ended without [DONE]": 1}


def test_everything_else_is_one() -> None:
    assert seen("rolling update", stream(problem=GONE)).failed == 1, "nothing died"
    assert seen("node killed", stream(problem=GONE, first_ms=None)).failed == 1, "it had not begun"
    assert seen("node killed", sample(1004.0, status=500, problem="internal error")).failed == 1
    assert seen("node killed", sample(1004.0, status=0, problem="connection refused")).failed == 1


def test_a_refusal_is_an_answer() -> None:
    told = seen("rolling update", sample(1004.0, status=429, retry_after=True))
    assert (told.refused, told.cut, told.failed) == (1, 0, 0)


def test_a_failure_belongs_to_the_stage_in_which_it_ended() -> None:
    """A stream begun before the kill and cut by it, the last second of a stage, and what ended in the drain; not the warm-up."""
    stages = begun((WARM_UP, 0.5, 10.0), ("scale up", 0.5, 10.0), ("node killed", 0.5, 10.0))
    cut = sample(1019.5, 800, kind="completion", first_ms=5.0, problem=GONE)
    others = [sample(due_s, ms, status=500, problem="internal error") for due_s, ms in ((1005.0, 10), (1019.8, 10), (1029.0, 9000))]
    up, killed = changes.stages_of([*every(0.5, 1000.0, 60), cut, *others], stages, {})
    assert (up.cut, up.failed) == (0, 1)
    assert (killed.cut, killed.failed) == (1, 1)


def test_a_run_that_was_stopped_ends_with_its_last_request() -> None:
    stages = begun(("quiet", 0.5, 10.0), ("rolling update", 0.5, 10.0))[:-1]
    found = every(0.5, 1000.0, 36)
    assert changes.with_drain(found, stages)[-1].begin_s == pytest.approx(found[-1].done_s)
    assert [told.stage.name for told in changes.stages_of(found, changes.with_drain(found, stages), {})] == ["quiet", "rolling update"]
    assert changes.with_drain(found, begun(("quiet", 0.5, 10.0))) == begun(("quiet", 0.5, 10.0))


def test_the_first_change_that_goes_wrong_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So does a stage that begins before the last change is through."""

    def fails(_: object) -> None:
        raise OSError("no answer")

    message = stopped(monkeypatch, tmp_path / "a", {"quiet": lambda _: None, "rolling update": fails}, through=True)
    assert message == "rolling update: no answer"
    over = threading.Event()
    message = stopped(
        monkeypatch, tmp_path / "b", {"quiet": lambda _: over.wait(PATIENCE_S), "rolling update": lambda _: None}, through=False
    )
    assert message.startswith("rolling update began before")
    over.set()


def stopped(monkeypatch: pytest.MonkeyPatch, out: Path, events: dict[str, Callable[[object], object]], *, through: bool) -> str:
    """What `run_with_changes` raises when a run without Locust begins a stage for each event, where wanted when the last is through."""
    ticks = []

    def without_locust(plan: LoadPlan, *, tick: Callable[[], None]) -> None:
        out.mkdir()
        for stage in begun(*((name, 0.5, 1.0) for name in [*events, "scale down"])):
            samples.begin(out, stage)
            before = threading.enumerate()
            tick()
            ticks.append(stage.name)
            for thread in set(threading.enumerate()) - set(before) if through else ():
                thread.join()
            tick()

    monkeypatch.setattr(changes, "EVENTS", {**events, "scale down": lambda _: pytest.fail("the run went on")})
    monkeypatch.setattr(locust_run, "run", without_locust)
    plan = SimpleNamespace(out=out, stages=[Stage(name=name, seconds=1, level=1) for name in events] + [DRAIN])
    with pytest.raises(changes.ChangeFailed) as caught:
        changes.run_with_changes(plan, SimpleNamespace(), {})  # type: ignore[arg-type]
    assert "scale down" not in ticks
    return str(caught.value)


def test_who_waits_for_a_cluster_that_is_stopped_waits_no_longer(tmp_path: Path) -> None:
    made = cluster.Cluster(tmp_path, {}, {})
    made.stop()
    with pytest.raises(changes.LoadtestError, match="it never is"):
        made.until(lambda: False, "it never is", 3600)
