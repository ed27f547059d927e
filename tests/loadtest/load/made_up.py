"""Requests of a made-up service, for what is computed from them."""

from loadtest.load.samples import Begun, Sample


def sample(due_s: float, ms: float = 10.0, **more: object) -> Sample:
    values = {"kind": "embed", "due_s": due_s, "ms": ms, "late_ms": 0.1, "status": 200, "tokens": 12, **more}
    return Sample(**values)  # type: ignore[arg-type]


def every(seconds: float, begin_s: float, count: int, **more: object) -> list[Sample]:
    """So many requests, evenly apart."""
    return [sample(begin_s + number * seconds, **more) for number in range(count)]


def begun(*stages: tuple[str, float, float]) -> list[Begun]:
    """Stages as (name, level, seconds), from moment 1,000 on, and the drain."""
    at, made = 1000.0, []
    for name, level, seconds in stages:
        made.append(Begun(name, level, round(level * 100), at))
        at += seconds
    return [*made, Begun("drain", 0.0, 0, at)]
