"""The plan of a load test: which requests are sent, and at which rate over time. Locust gets it as one argument, in JSON."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from loadtest.load.shapes import STAGES, Shape

SOURCES = 100  # number of independent Poisson sources whose sum is level 1; so levels can be set in steps of 1 %


class Stage(BaseModel):
    """A period with constant load. `level` is a multiple of the plan's rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    seconds: float = Field(gt=0)
    level: float = Field(ge=0)
    idle: int = Field(default=0, ge=0, description="Open connections that send nothing.")
    slow: int = Field(default=0, ge=0, description="Clients that read their streams a few bytes at a time.")


class LoadPlan(BaseModel):
    """The plan of one load test. In open loop, `rate` is the number of arrivals per second at level 1. In closed loop, it is the number of
    clients at level 1, each of which has one request in flight.

    In closed loop a Locust user is one client. In open loop it is a Poisson source of `rate` / SOURCES requests per second. The sources
    add up to a Poisson process, however Locust distributes them over workers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    out: Path
    seed: int
    open_loop: bool
    rate: float = Field(gt=0)
    mix: Mapping[str, int] = Field(min_length=1, description="Kind of client: its share.")
    models: Mapping[str, str] = Field(description="Task (embed, complete, chat, rerank): the model that is asked.")
    stages: tuple[Stage, ...] = Field(min_length=1)
    words: int | None = Field(default=None, ge=1, description="Length of every text to embed, in words; a distribution without it.")
    turns: int | None = Field(default=None, ge=1, description="Closed loop: requests of a client, which then sends no more.")
    max_tokens: int = Field(default=128, ge=1, description="Tokens asked of a stream.")
    timeout_s: float = Field(default=120.0, gt=0, description="A request without its whole answer by then has failed.")

    def users(self, level: float) -> int:
        """Return the number of Locust users for a level."""
        return round(level * (SOURCES if self.open_loop else self.rate))

    @property
    def source_rate(self) -> float:
        """Requests per second of one source."""
        return self.rate / SOURCES


# The last stage of every load test: no arrivals, until no request is in flight. A request that is still in flight after 60 s (longer than
# bulk work may wait) counts as unanswered.
DRAIN = Stage(name="drain", seconds=60, level=0)


def stages(shape: Shape, seconds: float, *, idle: int = 1000, slow: int = 20) -> tuple[Stage, ...]:
    """Return the stages of `shape`, which take `seconds` in total, followed by the drain. During the stage `crowd`, `idle` connections that
    send nothing and `slow` clients that read slowly are connected."""
    made = [Stage(name=name, level=level, seconds=share * seconds) for name, level, share in STAGES[shape]]
    return (*(stage.model_copy(update={"idle": idle, "slow": slow}) if stage.name == "crowd" else stage for stage in made), DRAIN)
