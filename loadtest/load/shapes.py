"""How the load of a test changes over time, as data. Plain Locust reads it too, so it needs only the standard library."""

from enum import StrEnum

# A shape is a series of stages, each given as (name, level, share of the total time). A level is a multiple of the knee.
WARM_UP = "warm-up"


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
    # The stages `alone` and `crowd` are compared by their p99, which needs hundreds of requests of a kind (`ENOUGH` in command.py).
    Shape.crowd: ((WARM_UP, 0.5, 0.05), ("alone", 0.5, 0.45), ("crowd", 0.5, 0.45), ("after", 0.5, 0.05)),
}
SECONDS = {
    Shape.steady: 60,
    Shape.ramp: 150,
    Shape.spike: 60,
    Shape.soak: 1200,
    Shape.overload: 60,
    Shape.crowd: 180,
}  # shape -> default length of a load test in seconds
