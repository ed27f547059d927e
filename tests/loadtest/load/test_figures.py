"""Samples become figures, knees, recoveries and verdicts."""

from pathlib import Path

import pytest

from loadtest.common.report import Verdict
from loadtest.errors import LoadtestError
from loadtest.load import figures, knee, pass_marks, samples
from loadtest.load.figures import StageFigures
from loadtest.load.pass_marks import FILE, PassMark
from loadtest.load.samples import StageStart
from loadtest.load.shapes import Shape
from tests.loadtest.load.made_up import begun, every, late, sample, steps


def test_figures_are_of_the_requests_due_in_a_stage_once_it_has_settled():
    stages = begun(("a", 1.0, 11), ("b", 2.0, 11))
    early, late = every(0.1, 1000.0, 10, ms=999), every(0.1, 1001.0, 100, ms=20)
    refused = [sample(1005.0, status=429, retry_after=True), sample(1005.0, status=429)]
    broken = [sample(1006.0, status=200, problem="the stream broke"), sample(1006.0, status=0, problem="timeout")]
    hostile = [sample(1007.0, kind="hostile", status=400), sample(1007.0, kind="hostile", status=500, problem="500")]
    first, second = figures.by_stage([*early, *late, *refused, *broken, *hostile], stages)
    assert (first.all.arrivals, first.all.offered_per_s) == (104, 10.4)
    assert (first.all.p50_ms, first.all.p99_ms) == (20, 20)
    # 100 due in the stage, and the 10 that were due in its first second and done later
    assert first.all.answered_per_s == pytest.approx(11.0 - 0.1, abs=0.2)
    assert first.all.refused_share == pytest.approx(2 / 104)
    assert first.all.retry_after_share == 0.5
    assert first.all.error_share == pytest.approx(2 / 104)
    assert first.kinds["hostile"].error_share == 0.5
    assert (second.all.arrivals, second.all.p99_ms) == (0, None)


def test_metrics_of_streams_are_of_good_streams_only():
    good = [sample(1002.0 + n, kind="chat", first_ms=100.0, between_ms=10.0, longest_ms=50.0) for n in range(5)]
    bad = [sample(1003.0, kind="chat", first_ms=9999.0, between_ms=999.0, problem="the stream broke")]
    found = figures.by_stage([*good, *bad], begun(("a", 1.0, 11)))[0].kinds["chat"]
    assert (found.first_p99_ms, found.between_p50_ms, found.longest_p99_ms, found.stream_tokens_per_s) == (100, 10, 50, 100)


def test_the_knee_is_the_last_step_before_the_first_that_is_too_much():
    found = knee.knee(steps((10, 0), (20, 0), (45, 0), (60, 0), (40, 0)))
    assert found is not None
    assert (found.stage.name, found.reached) == ("x3", True)


def test_refusals_are_too_much_as_well():
    found = knee.knee(steps((10, 0), (10, 2)))
    assert found is not None
    assert found.stage.name == "x1"


def test_a_ramp_that_ends_too_early_says_so():
    found = knee.knee(steps((10, 0), (20, 0)))
    assert found is not None
    assert (found.stage.name, found.reached) == ("x2", False)
    assert knee.knee(steps((10, 50), (10, 0))) is None


def test_a_knee_is_not_judged_where_the_generator_was_late():
    """Its own delay is in every latency, and sends requests in bursts: in the step that is too much, and in the one before."""
    ramp = steps((10, 0), (20, 0), (900, 0), (20, 0))
    assert found_late(ramp) is None
    assert found_late(late(ramp, "x3", 252.0)) == 252
    assert found_late(late(ramp, "x2", 60.0)) == 60
    assert found_late(late(ramp, "x4", 252.0)) is None, "after the knee"
    assert found_late(late(ramp, "x3", 80.0)) is None, "a small part of the latency"
    assert found_late(late(steps((900, 50), (10, 0)), "x1", 252.0)) == 252, "even the first step"


def found_late(ramp: list[StageFigures]) -> float | None:
    found = knee.knee(ramp)
    assert found is not None
    return found.late_ms


def test_recovery_ends_with_the_last_bad_second():
    slow, good = every(0.1, 1000.0, 25, ms=500), every(0.1, 1002.5, 75, ms=10)
    assert knee.recovery_s([*slow, *good], 1000.0, 1010.0, normal_ms=50) == 3
    assert knee.recovery_s([*slow, *good, sample(1006.5, status=429)], 1000.0, 1010.0, normal_ms=50) == 7
    assert knee.recovery_s(good, 1002.5, 1010.0, normal_ms=50) == 0


def test_samples_survive_their_file(tmp_path: Path):
    samples.write_header(tmp_path)
    whole = sample(1000.25, kind="chat", first_ms=3.0, between_ms=1.5, longest_ms=4.0, retry_after=True, problem='a, "b"\nc')
    samples.append(tmp_path, [whole, sample(1001.0)])
    samples.begin(tmp_path, StageStart("a", 0.5, 50, 1000.0))
    assert samples.read(tmp_path) == ([whole, sample(1001.0)], [StageStart("a", 0.5, 50, 1000.0)])


def test_a_run_without_samples_points_to_locusts_log(tmp_path: Path):
    samples.write_header(tmp_path)
    with pytest.raises(LoadtestError, match=r"locust\.log"):
        samples.read(tmp_path)


# Marks -----------------------------------------------------------------------------------------------------------------------------------


def test_a_mark_is_met_missed_or_not_measured():
    stages = steps((10, 0), (20, 0))
    wanted = [
        PassMark(stage="x1", figure="embed.p99_ms", at_most=10, why="w"),
        PassMark(stage="x2", figure="all.p99_ms", at_most=10, why="w"),
        PassMark(stage="x2", figure="chat.first_p99_ms", at_most=10, why="w"),
        PassMark(stage="run", figure="recovery_s", at_most=5, why="w"),
        PassMark(stage="run", figure="knee_reached", at_least=1, why="w"),
    ]
    judged = pass_marks.judge(wanted, stages, {"recovery_s": 5.0, "knee_reached": 0.0})
    met, missed, absent = Verdict.passed, Verdict.failed, Verdict.not_measured
    assert [each.verdict for each in judged] == [met, missed, absent, met, missed]


def test_a_figure_that_should_be_there_and_is_not_is_a_miss():
    """Overload without a refusal, a recovery that could not be told: only a kind of client may be absent."""
    stages = steps((10, 0))
    wanted = [
        PassMark(stage="x1", figure="all.retry_after_share", at_least=1, why="w"),
        PassMark(stage="x9", figure="all.error_share", at_most=0, why="w"),
        PassMark(stage="run", figure="recovery_s", at_most=5, why="w"),
        PassMark(stage="x1", figure="chat.error_share", at_most=0, why="w"),
    ]
    judged = pass_marks.judge(wanted, stages, {"recovery_s": None})
    assert [each.verdict for each in judged] == [Verdict.failed] * 3 + [Verdict.not_measured]


@pytest.mark.parametrize("figure", sorted(pass_marks.NOT_SEEN))
def test_what_a_run_could_not_see_is_not_judged(figure: str):
    """And that is no pass: the command ends with 1."""
    (judged,) = pass_marks.judge([PassMark(stage="run", figure=figure, at_most=0, why="w")], [], {figure: None})
    assert judged.verdict == Verdict.not_judged


@pytest.mark.parametrize("shape", Shape)
def test_in_every_shape_each_request_must_be_answered(shape: Shape):
    assert ("run", "unanswered", 0) in [(mark.stage, mark.figure, mark.at_most) for mark in pass_marks.load(FILE, shape)]


@pytest.mark.parametrize(("shape", "stage"), [("steady", "steady"), ("spike", "spike"), ("soak", "soak"), ("crowd", "crowd")])
def test_no_stage_under_load_may_fail(shape: str, stage: str):
    assert (stage, "all.error_share", 0) in [(mark.stage, mark.figure, mark.at_most) for mark in pass_marks.load(FILE, Shape(shape))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[steady]]\nstage = "steady"\nfigure = "all.p99"\nat_most = 1\nwhy = ""', "p99 is not a figure of a stage"),
        ('[[steady]]\nstage = "stedy"\nfigure = "all.p99_ms"\nat_most = 1\nwhy = ""', "has no stage stedy"),
        ('[[steady]]\nstage = "steady"\nfigure = "all.p99_ms"\nwhy = ""', "needs one of at_most and at_least"),
        ('[[stedy]]\nstage = "steady"\nfigure = "all.p99_ms"\nat_most = 1\nwhy = ""', "'stedy' is not a valid Shape"),
        ('[[steady]]\nstage = "steady"\nfigure = "all.p99_ms"\nat_mots = 1\nwhy = ""', "at_mots"),
        ("[[steady", "marks.toml"),
    ],
)
def test_a_mark_that_could_never_be_missed_is_an_error(tmp_path: Path, text: str, words: str):
    (file := tmp_path / "marks.toml").write_text(text)
    with pytest.raises(LoadtestError, match=words):
        pass_marks.load(file, Shape.steady)
