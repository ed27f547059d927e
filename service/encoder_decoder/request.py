"""A request to the engine of an encoder-decoder."""

from dataclasses import dataclass

from service.generation.request import GenerationRequest


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderRequest(GenerationRequest):
    """A request for the `n` best outputs of one source. Each output is a run, best first. Greedy output arrives token by token, and the
    output of a beam search arrives at its end.

    The most likely output is generated and nothing is sampled, so the inherited sampling and stop settings have no effect.
    """

    n: int = 1
    beams: int = 1  # beam width, at least n; a width of 1 is greedy search
    attention: bool = False

    @property
    def slots(self) -> int:
        """Return the largest number of rows that the request's search may use."""
        return self.beams

    @property
    def takes_known(self) -> bool:
        return False

    @property
    def outputs(self) -> int:
        return self.n
