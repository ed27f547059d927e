"""What a caller asks of the engine."""

from dataclasses import dataclass

from service.generation.request import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class WritingRequest(GenerationRequest):
    """One source, `n` outputs of it, best first. `n` runs are its answer: a greedy one comes token by token, a beam's all at its end.

    The likeliest output is written and nothing is drawn: of what it inherits, what says how to draw or when to stop does not count.
    """

    n: int = 1
    beams: int = 1  # outputs that are followed side by side, at least n; 1 is greedy
    attention: bool = False

    @property
    def slots(self) -> int:
        """The rows that its beam may come to have."""
        return self.beams

    @property
    def outputs(self) -> int:
        return self.n
