"""The configs of an attention transfer (window, feature maps, texts, learning rate) and of the tuning after it (changes, loss, batches)."""

import math
from dataclasses import dataclass
from typing import Any

from models.decoder.window import LongWindow


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


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """The config of a tuning. Raises ValueError, with the values, if they do not fit together.

    The learning rates are for a run of some thousand steps. AdamW moves every number by about its rate in a step. An exponent of a map is a
    sum over 64 columns, so its rate must be lower than where layers learn apart from each other. B begins at 0, and its products with A
    (entries of about 0.02) and the scale move an entry of W, of about 0.05, by up to 1e-4 in a step.
    """

    long_layers: str = ""  # numbers of layers that get a longer window in place of maps, such as "3,17"; none: as the delta has it
    long_window: int = 0  # tokens of that window; 0: as the delta has it
    rank: int = 16  # r of the changes
    scale: float = 2.0  # their factor: W + scale B A
    feedforward: bool = False  # also change the projections of the feed-forward layers
    context: int = 4_096  # N, tokens of a text
    batch: int = 4  # texts of a step
    steps: int = 0  # of the run; 0: no limit
    minutes: float = 4.0  # of training, without evaluations; 0: no limit
    rate: float = 1e-3  # highest learning rate of the changes
    map_rate: float = 2e-3  # highest learning rate of the maps
    warm_up: float = 0.04  # share of the run in which the learning rates rise from 0; then they fall along a cosine
    label_share: float = 0.0  # share of the true next token in the loss; the rest is KL(teacher || student)
    clip: float = 1.0  # largest norm of all gradients together
    evaluations: int = 2  # on held-out texts, evenly over the run, besides the one before it
    held_out: int = 8  # most held-out texts of an evaluation
    checkpoint_steps: int = 400  # steps between checkpoints, at which the student is written too
    fused: bool = True  # on a GPU, near tokens by torch's fused operator in bfloat16; False: by products in TF32, three times the memory
    compiled: bool = False  # compile the attention: faster afterwards, but the first step takes a minute or so more
    recompute: bool = False  # compute attention again for its gradients: takes less memory and more time
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "batch", "held_out", "evaluations", "checkpoint_steps", "context"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("scale", "rate", "clip"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value} must be above 0")
        for name in ("steps", "minutes", "map_rate"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value} must be 0 or more")
        try:
            self.long  # noqa: B018  raises ValueError
        except ValueError as error:
            raise ValueError(f"long_layers={self.long_layers!r} are not numbers of layers; write them as 3,17") from error
        if bool(self.long_layers) != bool(self.long_window):
            raise ValueError(f"long_layers={self.long_layers!r}, long_window={self.long_window}: give both, or neither to keep the delta's")
        if not self.steps and not self.minutes:
            raise ValueError("steps=0 and minutes=0.0, so the run would not end; give one of them")
        for name in ("label_share", "warm_up"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name}={value} must be from 0 to 1")

    @property
    def long(self) -> LongWindow | None:
        """The layers with a longer window, if any are given. Raises ValueError if they are not numbers."""
        return LongWindow(tuple(sorted(map(int, self.long_layers.split(",")))), self.long_window) if self.long_layers else None

    def height(self, share: float) -> float:
        """Return the learning rates, as a share of the highest ones, when `share` of the run is over."""
        if share < self.warm_up:
            return (share + 1e-3) / (self.warm_up + 1e-3)  # not 0 at the first step
        return (1 + math.cos(math.pi * (share - self.warm_up) / max(1 - self.warm_up, 1e-9))) / 2
