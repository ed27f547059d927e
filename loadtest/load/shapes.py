"""How a load changes over time: stages as (name, level, share of the time), a level being a multiple of the knee."""

from enum import StrEnum

from loadtest.load.plan import Stage

WARM_UP = "warm-up"
# Nothing arrives; it ends when no request is open. A request that is open after 60 s, longer than bulk work may wait, is unanswered.
DRAIN = Stage(name="drain", seconds=60, level=0)


class Shape(StrEnum):
    steady = "steady"
    ramp = "ramp"
    spike = "spike"
    soak = "soak"
    overload = "overload"
    crowd = "crowd"


RAMP = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6)
STAGES: dict[Shape, tuple[tuple[str, float, float], ...]] = {
    Shape.steady: ((WARM_UP, 0.5, 0.15), ("steady", 0.5, 0.85)),
    Shape.ramp: ((WARM_UP, 0.2, 0.1), *((f"x{level:g}", level, 0.9 / len(RAMP)) for level in RAMP)),
    Shape.spike: ((WARM_UP, 0.5, 0.1), ("before", 0.5, 0.3), ("spike", 2.0, 0.2), ("after", 0.5, 0.4)),
    Shape.soak: ((WARM_UP, 0.5, 0.2), ("soak", 0.5, 0.8)),
    Shape.overload: ((WARM_UP, 0.5, 0.1), ("knee", 1.0, 0.3), ("overload", 3.0, 0.3), ("recovery", 0.5, 0.3)),
    # Long, and with little beside the two that are compared: a p99 needs hundreds of arrivals of a kind (`ENOUGH` in command.py).
    Shape.crowd: ((WARM_UP, 0.5, 0.05), ("alone", 0.5, 0.45), ("crowd", 0.5, 0.45), ("after", 0.5, 0.05)),
}
SECONDS = {
    Shape.steady: 60,
    Shape.ramp: 150,
    Shape.spike: 60,
    Shape.soak: 1200,
    Shape.overload: 60,
    Shape.crowd: 180,
}  # the default length of a run


def stages(shape: Shape, seconds: float, *, idle: int = 1000, slow: int = 20) -> tuple[Stage, ...]:
    """The stages of a run that lasts so long, before it drains. The crowd is there in the stage of that name."""
    made = [Stage(name=name, level=level, seconds=share * seconds) for name, level, share in STAGES[shape]]
    return (*(stage.model_copy(update={"idle": idle, "slow": slow}) if stage.name == "crowd" else stage for stage in made), DRAIN)
