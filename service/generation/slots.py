"""Memory for the states of many sequences, bound to the step graph as it is.

Two sets of states: a step reads one and writes the other, then they change places, so no state is copied between steps. Rows in use are the
first ones, so a batch is a view. A row that leaves is filled with the last one: the one copy there is, once a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from service.generation.session import Ids, States, StepSession, Tensor

Owner = TypeVar("Owner")


class WrongOwner(RuntimeError):
    """A row is not at the position that its owner expects: it has another run's state, or a step was lost."""


@dataclass(frozen=True)
class Row:
    """A row of other slots. Valid until those slots are used again."""

    slots: "Slots[Any]"
    at: int


class Slots(Generic[Owner]):
    """Up to `size` rows, each with its owner and the number of tokens that its state has seen."""

    def __init__(self, session: StepSession[Any], size: int) -> None:
        self.size = size
        self.owners: list[Owner] = []
        self.positions: Ids = np.zeros(size, np.int64)
        self.flipped = False  # which of the two sets of memory is in front
        self._front: States = session.states(size)
        self._back: States = session.states(size)

    def __len__(self) -> int:
        return len(self.owners)

    def add(self, owner: Owner, states: Sequence[Tensor] | Row | None = None, position: int = 0) -> int:
        """A row for `owner`: zeroed, or with a copy of `states` (each without B), which have seen `position` tokens."""
        assert len(self.owners) < self.size
        row = len(self.owners)
        if isinstance(states, Row):
            self._front.copy(row, states.slots._front, states.at)
        else:
            self._front.put(row, states)
        self.positions[row] = position
        self.owners.append(owner)
        return row

    def remove(self, row: int) -> int | None:
        """Free a row. Returns the row that was moved into its place, None if it was the last."""
        last = len(self.owners) - 1
        if row != last:
            self._front.copy(row, self._front, last)
            self.positions[row] = self.positions[last]
            self.owners[row] = self.owners[last]
        self.owners.pop()
        return last if row != last else None

    def state(self, row: int) -> list[Tensor]:
        """A copy of a row's states, each without B."""
        return self._front.read(row)

    @property
    def sets(self) -> tuple[Any, Any]:
        """The states that a step reads, and those that it writes: of the session's own kind, the rows in use in front."""
        return self._front, self._back

    def stepped(self, lengths: Ids) -> None:
        """The graph has written new states for the rows in use: they are the states from now on."""
        self._front, self._back = self._back, self._front
        self.flipped = not self.flipped
        self.positions[: len(self.owners)] += lengths

    def check(self, owners: Sequence[Owner], positions: Sequence[int]) -> None:
        """WrongOwner unless every row in use is what its owner takes it for."""
        if self.owners == owners and self.positions[: len(owners)].tolist() == positions:
            return
        for row, (owner, position) in enumerate(zip(self.owners, positions, strict=True)):
            if owner != owners[row]:
                raise WrongOwner(f"slot {row} belongs to another run")
            if self.positions[row] != position:
                raise WrongOwner(f"slot {row} is at position {self.positions[row]}, its owner at {position}")
