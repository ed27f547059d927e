"""What an engine's queue holds: jobs, grouped by the API request that submitted them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from service.generation.request import GenerationRequest
from service.generation.run import Run
from service.runtime.lanes import Lane


class Job(Protocol):
    """Runs that are computed together and hold their slots together: one sequence, or all outputs of one source."""

    aside: bool  # it had slots, gave them back, and waits for others

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
        """Tokens to feed before it draws."""
        ...

    @property
    def gone_on(self) -> int:
        """Tokens fed since it got its slots."""
        ...


J = TypeVar("J", bound=Job)


@dataclass(eq=False)
class Submission(Generic[J]):
    """The jobs of one API request that have no slots, in the order in which they get some: jobs that had some before come first."""

    client: str
    lane: Lane
    submitted: float  # time.monotonic()
    since: float  # when it was submitted, and then when one of its jobs last got slots or gave them back
    fresh: deque[J] = field(default_factory=deque)
    aside: deque[J] = field(default_factory=deque)
    begun: bool = False  # one of its jobs has had slots

    def __len__(self) -> int:
        return len(self.fresh) + len(self.aside)

    @property
    def slots(self) -> int:
        """Slots that its jobs wait for."""
        return sum(job.slots for job in (*self.fresh, *self.aside))

    @property
    def tokens(self) -> int:
        """Prompt tokens to feed; a prompt that several jobs share is fed once."""
        return sum({id(job.request.prompt): job.left_of_prompt for job in self.fresh}.values())
