"""Requests of a made-up service, for what is computed from them."""

from collections.abc import Sequence

from loadtest.load import figures
from loadtest.load.figures import ALL, StageFigures
from loadtest.load.samples import Sample, StageStart


def sample(due_s: float, ms: float = 10.0, **more: object) -> Sample:
    values = {"kind": "embed", "due_s": due_s, "ms": ms, "late_ms": 0.1, "status": 200, "tokens": 12, **more}
    return Sample(**values)  # type: ignore[arg-type]


def every(seconds: float, begin_s: float, count: int, **more: object) -> list[Sample]:
    """So many requests, evenly apart."""
    return [sample(begin_s + number * seconds, **more) for number in range(count)]


def begun(*stages: tuple[str, float, float]) -> list[StageStart]:
    """Stages as (name, level, seconds), from moment 1,000 on, and the drain."""
    at, made = 1000.0, []
    for name, level, seconds in stages:
        made.append(StageStart(name, level, round(level * 100), at))
        at += seconds
    return [*made, StageStart("drain", 0.0, 0, at)]


def steps(*p95s_and_refused: tuple[float, int]) -> list[StageFigures]:
    """Steps of 100 requests each, all as slow as given, so many of them refused."""
    stages = begun(*((f"x{at}", float(at), 11) for at, _ in enumerate(p95s_and_refused, 1)))
    made: list[Sample] = []
    for stage, (ms, refused) in zip(stages, p95s_and_refused, strict=False):
        made += every(0.05, stage.begin_s + 1.5, 100 - refused, ms=ms)
        made += every(0.05, stage.begin_s + 1.5, refused, status=429, retry_after=True)
    return figures.by_stage(made, stages)


def late(ramp: Sequence[StageFigures], name: str, ms: float) -> list[StageFigures]:
    """The steps, in one of which the generator was so late."""

    def delayed(step: StageFigures) -> StageFigures:
        return step.model_copy(update={"kinds": {**step.kinds, ALL: step.all.model_copy(update={"late_p99_ms": ms})}})

    return [delayed(step) if step.name == name else step for step in ramp]
