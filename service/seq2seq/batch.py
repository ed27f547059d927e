"""The rows of all searches that are under way, side by side in one set of arrays, each at its own step."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.seq2seq.search import Search
from service.seq2seq.session import Rows, Tensors, WritingSession


class Searching(Protocol):
    """An owner of a search."""

    search: Search


Job = TypeVar("Job", bound=Searching)


class Batch(Generic[Job]):
    """`jobs` in the order of their rows; a job has as many rows as its search goes on with."""

    def __init__(self, session: WritingSession) -> None:
        self.jobs: list[Job] = []
        self._session = session
        self._rows: Rows | None = None

    @property
    def n_rows(self) -> int:
        return sum(len(job.search.alive) for job in self.jobs)

    def join(self, jobs: Sequence[Job], sources: Sequence[list[int]]) -> None:
        """Read the sources, one of each job, and put them behind the others."""
        new = self._session.read(sources)
        self._rows = new if self._rows is None else _joined(self._rows, new)
        self.jobs += jobs

    def step(self) -> None:
        """One token for every row. Jobs whose search is over have no rows from then on, until `leave` takes them out."""
        assert self._rows is not None
        previous = np.array([token for job in self.jobs for token in job.search.previous], np.int64)
        made = self._session.step(previous, self._rows)
        if not np.isfinite(made.logits).all():
            raise FloatingPointError("logits that are not finite")
        kept: list[int] = []
        at = 0
        for job in self.jobs:
            R = len(job.search.alive)
            kept += [at + parent for parent in job.search.advance(made.logits[at : at + R], made.attention[at : at + R])]
            at += R
        self._rows.state = made.state
        self._keep(kept, at)

    def leave(self, job: Job) -> None:
        """Take this one out, with what rows it still has."""
        gone = self.jobs.index(job)
        before = sum(len(each.search.alive) for each in self.jobs[:gone])
        total, own = self.n_rows, len(job.search.alive)
        self.jobs.pop(gone)
        self._keep([*range(before), *range(before + own, total)], total)

    def _keep(self, rows: list[int], total: int) -> None:
        """These rows, in this order, of all that there were; as wide as the longest source among them."""
        if not rows:
            self._rows = None
        elif rows != list(range(total)) and self._rows is not None:
            mask = self._rows.mask[rows]
            N = int(mask.sum(axis=1).max())
            memory = {name: value[rows, :N] for name, value in self._rows.memory.items()}
            self._rows = Rows(mask[:, :N], memory, _taken(self._rows.state, rows))


def _joined(one: Rows, other: Rows) -> Rows:
    N = max(one.mask.shape[1], other.mask.shape[1])
    return Rows(
        np.concatenate([_widened(rows.mask, N) for rows in (one, other)]),
        {name: np.concatenate([_widened(rows.memory[name], N) for rows in (one, other)]) for name in one.memory},
        {name: np.concatenate([rows.state[name] for rows in (one, other)]) for name in one.state},
    )


def _widened(values: NDArray[np.generic], N: int) -> NDArray[np.generic]:
    """(R, n, ..) -> (R, N, ..), padded with zeros."""
    return np.pad(values, [(0, 0), (0, N - values.shape[1]), *[(0, 0)] * (values.ndim - 2)])


def _taken(tensors: Tensors, rows: list[int]) -> Tensors:
    return {name: value[rows] for name, value in tensors.items()}
