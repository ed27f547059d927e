"""A request to the engine of an encoder-decoder."""

from dataclasses import dataclass

from service.generation.request import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class WritingRequest(GenerationRequest):
    """One source and its `n` best outputs, best first, one run each. Greedy output arrives token by token, beam output all at the end.

    The most likely output is generated and nothing is sampled, so the inherited sampling and stop settings have no effect.
    """

    n: int = 1
    beams: int = 1  # beam width, at least n; 1 is greedy search
    attention: bool = False

    @property
    def slots(self) -> int:
        """The most rows that its search may use."""
        return self.beams

    @property
    def takes_known(self) -> bool:
        return False

    @property
    def outputs(self) -> int:
        return self.n
