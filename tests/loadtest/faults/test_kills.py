"""What the report of a kill reads from the service's log."""

from loadtest.faults.kills import steps


def test_steps_are_read_from_lines_that_ray_shares() -> None:
    """Ray prints from a thread of its own, and its words may stand before a record on the same line."""
    ended = '{"time": "2026-11-23T01:18:24.643Z", "level": "WARNING", "logger": "attnserve", "message": "replica ended", "kind": "ingress"}'
    loaded = '{"time": "2026-11-23T01:18:26.143Z", "level": "INFO", "logger": "attnserve", "message": "loaded", "model": "tiny"}'
    output = f"(raylet) A worker died or was killed.{ended}\nready\n{loaded}(raylet) Another word.\n"
    found = steps(output, 0.0)
    assert list(found) == ["replica ended", "loaded tiny"]
    assert round(found["loaded tiny"] - found["replica ended"], 3) == 1.5
