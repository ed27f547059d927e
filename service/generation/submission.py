"""The items of an engine's queue: jobs, grouped by the API request that submitted them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.runtime.lanes import Lane


class Job(Protocol):
    """The runs that get and free their slots together: one sequence of a decoder, or all outputs of one source of an encoder-decoder."""

    aside: bool  # whether the job was preempted and waits for slots

    @property
    def request(self) -> GenerationRequest: ...

    @property
    def runs(self) -> Sequence[Run]: ...

    @property
    def submission(self) -> "Submission[Any]": ...

    @property
    def slots(self) -> int: ...

    @property
    def left_of_prompt(self) -> int:
        """Return the number of prompt tokens to feed before the job's first token is drawn."""
        ...

    @property
    def gone_on(self) -> int:
        """Return the number of tokens fed since the job got its slots."""
        ...


J = TypeVar("J", bound=Job)


@dataclass(eq=False)
class Submission(Generic[J]):
    """The jobs of one API request that wait for slots. Preempted jobs (`aside`) get slots before jobs that never had any (`fresh`)."""

    client: str
    lane: Lane
    submitted: float  # when it was submitted, in seconds of time.monotonic()
    since: float  # when it was submitted, or when one of its jobs last got or lost slots
    fresh: deque[J] = field(default_factory=deque)
    aside: deque[J] = field(default_factory=deque)
    most_wait_s: float = 0.0  # how long it may wait for its first slots, if that is more than the setting says
    begun: bool = False  # whether any of its jobs has had slots

    def __len__(self) -> int:
        return len(self.fresh) + len(self.aside)

    @property
    def slots(self) -> int:
        """Return the number of slots for which the request's jobs wait."""
        return sum(job.slots for job in (*self.fresh, *self.aside))

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens to feed. A prompt that several jobs share is counted once."""
        return sum({id(job.request.prompt): job.left_of_prompt for job in self.fresh}.values())
