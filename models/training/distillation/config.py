"""The config of a distillation: the new attention, the texts, the steps and the learning rates."""

import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.attention.layers.causal import CausalLayer
from models.layers import LAYERS

Phase = Literal["transfer", "end to end"]


class DistillationConfig(BaseModel):
    """The config of a distillation. Its values are checked when it is created."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention: str
    options: dict[str, Any] = {}  # keyword arguments of the layer's constructor
    n_positions: int = Field(8_192, ge=2)  # longest input of the student, in tokens
    transfer_steps: int = Field(400, ge=0)
    end_to_end_steps: int = Field(400, ge=0)
    per_kind: int = 8_000  # maximum number of training texts of each kind
    tokens: int = 4_096  # maximum tokens of a batch, padding included
    shortest: int = Field(1, ge=1)  # minimum length of a training text, in tokens
    longest: int = 1_024  # maximum length of a training text, in tokens; longer texts are cut
    map_rate: float = 1e-2  # peak learning rate of the new parameters (which the teacher does not have), in the transfer phase
    end_map_rate: float = 2e-3  # peak learning rate of the new parameters, in the end-to-end phase
    end_rate: float = Field(0.0, ge=0)  # peak learning rate of the blocks' other parameters, in the end-to-end phase; 0 freezes them
    similarities: float = 1.0  # weight of the term for the texts' similarities to each other, in the end-to-end loss
    hidden: float = 0.1  # weight of the term for the last layer's token vectors, in the end-to-end loss
    clip: float = 1.0  # maximum norm of the gradient of all parameters together
    warm_up: float = 0.05  # share of each phase in which the learning rate rises
    evaluations: int = 8  # number of evaluations on held-out text, evenly spread over all steps
    checkpoint_steps: int = 50
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        known = [name for name, layer in LAYERS.items() if not issubclass(layer, CausalLayer)]
        if self.attention not in known:
            raise ValueError(f"attention={self.attention!r} is not one of {', '.join(known)}")
        if self.steps < 1:
            raise ValueError("transfer_steps and end_to_end_steps must not both be 0")
        if not self.shortest <= self.longest <= min(self.tokens, self.n_positions):
            raise ValueError(
                f"shortest={self.shortest} and longest={self.longest} must be ordered, and at most tokens={self.tokens} and "
                f"n_positions={self.n_positions}"
            )
        return self

    @property
    def steps(self) -> int:
        return self.transfer_steps + self.end_to_end_steps

    def phase(self, step: int) -> Phase:
        return "transfer" if step < self.transfer_steps else "end to end"

    def rates(self, step: int) -> tuple[float, float]:
        """Return the learning rate of the new parameters and that of the blocks' other parameters. In each phase both rise linearly, then
        fall along a cosine.
        """
        if self.phase(step) == "transfer":
            return self.map_rate * self._height(step, self.transfer_steps), 0.0
        height = self._height(step - self.transfer_steps, self.end_to_end_steps)
        return self.end_map_rate * height, self.end_rate * height

    def _height(self, step: int, steps: int) -> float:
        share = (step + 1) / (steps + 1)
        return min(share / self.warm_up if self.warm_up else 1.0, (1 + math.cos(math.pi * share)) / 2)
