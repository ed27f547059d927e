"""The plan of one run of Locust. It is passed to every worker as one JSON argument."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

SOURCES = 100  # independent Poisson sources that make level 1 together: a level is exact to a hundredth


class Stage(BaseModel):
    """A piece of time under one load. `level` is a multiple of the plan's rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    seconds: float = Field(gt=0)
    level: float = Field(ge=0)
    idle: int = Field(default=0, ge=0, description="Open connections that send nothing.")
    slow: int = Field(default=0, ge=0, description="Clients that read their streams a few bytes at a time.")


class Plan(BaseModel):
    """One run. In open loop `rate` is arrivals a second at level 1, in closed loop the number of clients, each with one request at a time.

    A user of Locust is a client in closed loop. In open loop it is a Poisson source of `rate` / SOURCES requests a second: sources add up
    to a Poisson process of the sum, however Locust spreads them over workers, so its shapes mean rates.
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
        """The number of Locust's users for a level."""
        return round(level * (SOURCES if self.open_loop else self.rate))

    @property
    def source_rate(self) -> float:
        """Requests a second of one source."""
        return self.rate / SOURCES
