"""What a caller asks of the engine, and a run of it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.generation.request import GenerationRequest
from service.generation.run import Run

Weights = NDArray[np.float32]  # (N,), what of a source one token was written from


@dataclass(frozen=True, kw_only=True)
class WritingRequest(GenerationRequest):
    """One source, `n` outputs of it, best first. `n` runs are its answer.

    Of what it inherits, `prompt`, `max_tokens`, `lane` and `deadline` count: the likeliest output is written, nothing is drawn.
    """

    n: int = 1
    beams: int = 1  # outputs that are followed side by side, at least n; 1 is greedy
    attention: bool = False


@dataclass
class Attention:
    """What each token of an output was written from; complete when the run has ended."""

    tokens: list[int] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)


class WritingRun(Run):
    """One output. Greedy ones come token by token; of a beam nothing is known before its end."""

    attention: Attention | None = None
