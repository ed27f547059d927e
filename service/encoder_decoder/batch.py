"""The rows of all running searches, batched in one set of arrays, each search at its own step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.encoder_decoder.request import EncoderDecoderRequest
from service.encoder_decoder.search import Search
from service.encoder_decoder.session import EncoderDecoderSession, Rows, Tensors
from service.generation.run import Run
from service.generation.submission import Submission


@dataclass(eq=False)
class Source:
    """One source, the search for its outputs, and the runs that receive them."""

    request: EncoderDecoderRequest
    runs: Sequence[Run]
    search: Search
    submission: "Submission[Source]"
    aside: bool = False
    gone_on: int = 0  # always 0: a source is never preempted

    @property
    def slots(self) -> int:
        return self.request.slots

    @property
    def left_of_prompt(self) -> int:
        return len(self.request.prompt)


class Batch:
    """The rows of all running searches. `sources` are in the order of their rows, and each has one row for every unfinished output of its
    search.
    """

    def __init__(self, session: EncoderDecoderSession) -> None:
        self.sources: list[Source] = []
        self._session = session
        self._rows: Rows | None = None

    @property
    def n_rows(self) -> int:
        return sum(len(source.search.alive) for source in self.sources)

    def join(self, sources: Sequence[Source]) -> None:
        """Encode the sources, and append their rows."""
        new = self._session.read([list(source.request.prompt) for source in sources])
        self._rows = new if self._rows is None else _joined(self._rows, new)
        self.sources += sources

    def step(self) -> None:
        """Generate one token for every row. A source whose search has finished has no rows left, but remains until `leave`."""
        assert self._rows is not None
        previous = np.array([token for source in self.sources for token in source.search.previous], np.int64)
        made = self._session.step(previous, self._rows)
        if not np.isfinite(made.logits).all():
            raise FloatingPointError("logits that are not finite")
        kept: list[int] = []
        at = 0
        for source in self.sources:
            R = len(source.search.alive)
            kept += [at + parent for parent in source.search.advance(made.logits[at : at + R], made.attention[at : at + R])]
            at += R
        self._rows.state = made.state
        self._keep(kept, at)

    def leave(self, source: Source) -> None:
        """Remove a source and its remaining rows."""
        gone = self.sources.index(source)
        before = sum(len(each.search.alive) for each in self.sources[:gone])
        total, own = self.n_rows, len(source.search.alive)
        self.sources.pop(gone)
        self._keep([*range(before), *range(before + own, total)], total)

    def _keep(self, rows: list[int], total: int) -> None:
        """Keep only the rows with these indices, in this order, and shorten the padding to the longest remaining source. `total` is the
        number of rows before this call.
        """
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
    """Return the array padded with zeros along its second axis: (R, n, ..) -> (R, N, ..)."""
    return np.pad(values, [(0, 0), (0, N - values.shape[1]), *[(0, 0)] * (values.ndim - 2)])


def _taken(tensors: Tensors, rows: list[int]) -> Tensors:
    return {name: value[rows] for name, value in tensors.items()}
