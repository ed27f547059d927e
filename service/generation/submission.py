"""The items of an engine's queue: jobs, grouped by the API request that submitted them. And the interface of what computes them."""

from abc import ABC, abstractmethod
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


class Workload(ABC, Generic[J]):
    """What an engine computes: the jobs that hold slots, one step after the other. Used by the engine's thread; `held`, `holders` and
    `quantum` also on the event loop.
    """

    @property
    @abstractmethod
    def holders(self) -> list[J]:
        """Return the jobs that hold slots."""

    @property
    def held(self) -> int:
        """Return the number of slots held by jobs."""
        return sum(job.slots for job in self.holders)

    @property
    def quantum(self) -> int | None:
        """Return the number of tokens for which a job keeps its slots while other jobs wait, or None if it keeps them until it ends."""
        return None

    @property
    def room(self) -> bool:
        """Return whether one more job may be preempted."""
        return False

    @abstractmethod
    def place(self, job: J) -> None:
        """Give slots to a job."""

    def set_aside(self, job: J, now: float) -> None:
        """Preempt a job: free its slots for another job, and queue it again."""
        raise NotImplementedError

    @abstractmethod
    def compute(self) -> float:
        """Run one step for the jobs that hold slots, with every runtime call in `StepEngine.guarded`. Return the seconds within which the
        next call publishes, or inf.
        """

    @abstractmethod
    def remove(self, job: J) -> None:
        """Free the slots of a job that has ended, if it holds any."""

    @abstractmethod
    def end_at_deadline(self, job: J) -> None:
        """End the runs of a job as if they had reached their limit on tokens. Runs without a token fail."""

    def after_failure(self, jobs: list[J]) -> None:
        """Free the slots of the jobs in a failed call."""
        for job in jobs:
            self.remove(job)

    def close(self) -> None:
        """End other threads, because the engine stops."""
