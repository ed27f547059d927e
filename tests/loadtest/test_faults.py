"""How failures of a run with faults are told apart. The run itself needs a quiet machine; `tests/cluster/` has its events."""

from loadtest import faults
from loadtest.load import figures
from tests.loadtest.load.made_up import begun, every, sample

GONE = "the stream broke: {'message': 'the replica that worked on the request is gone: send the request again'}"


def seen(stage: str, *bad: object) -> faults.Seen:
    """A stage of ten seconds with good requests and `bad` ones."""
    found = [*every(0.5, 1000.0, 20), *bad]
    (told,) = figures.by_stage(found, begun((stage, 0.5, 10.0)))
    return faults.seen(told, found, 3.0)


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
