"""The config of an attention transfer: the window, the feature maps, the texts and the learning rate."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The config of an attention transfer. Raises ValueError, with the values, if they do not fit together."""

    window: int = 256  # W, tokens that a token attends to exactly, the first ones among them
    n_first: int = 4  # g
    context: int = 2_048  # N, tokens of a text
    texts: int = 64  # texts of the run
    parts: int = 4  # steps with the same text, each with the queries of another part of it
    minutes: float = 0.0  # the run ends after so many minutes of training, if it has steps left; 0: no limit
    rate: float = 1e-2  # highest learning rate
    warm_up: float = 0.05  # share of the run in which the learning rate rises from 0; then it falls along a cosine
    clip: float = 1.0  # largest norm of the gradient of all maps together
    evaluations: int = 6  # evaluations on held-out text, evenly over the steps
    held_out: int = 2  # held-out texts of an evaluation
    checkpoint_steps: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "parts", "held_out", "evaluations", "checkpoint_steps"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if (self.context - self.window) < self.parts:
            raise ValueError(f"context={self.context} must exceed window={self.window} by at least parts={self.parts} tokens")

    @property
    def steps(self) -> int:
        return self.texts * self.parts

    @property
    def options(self) -> dict[str, Any]:
        """The options of the layer `causal_hybrid` besides the window: as many slots as twice the window."""
        return {"n_first": self.n_first, "piece": self.window - 1}

    def part(self, step: int) -> slice:
        """Return the tokens whose queries are trained in a step: the parts of a text beyond the window, in turns."""
        far, number = self.context - self.window, step % self.parts
        return slice(self.window + far * number // self.parts, self.window + far * (number + 1) // self.parts)

    def rate_at(self, share: float) -> float:
        """Return the learning rate when `share` of the run is over."""
        return self.rate * min((share + 1 / self.steps) / self.warm_up if self.warm_up else 1.0, (1 + math.cos(math.pi * share)) / 2)
