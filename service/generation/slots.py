"""Memory for the states of many sequences, bound to the step graph as it is.

Two sets of arrays: a step reads one and writes the other, then they change places, so no state is copied between steps. Rows in use are the
first ones, so a batch is a view. A row that leaves is filled with the last one: the one copy there is, once a sequence.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from export import contract
from service.generation.session import Ids, State, zeros

Owner = TypeVar("Owner")


class WrongOwner(RuntimeError):
    """A row is not at the position where its owner believes it to be: somebody else's state, or a lost step."""


class Slots(Generic[Owner]):
    """Up to `size` rows, each with its owner and the number of tokens that its state has seen."""

    def __init__(self, decoder: contract.Decoder, size: int) -> None:
        self.size = size
        self.owners: list[Owner] = []
        self.positions: Ids = np.zeros(size, np.int64)
        self.flipped = False  # which of the two sets of memory is in front
        self._front, self._back = zeros(decoder, size), zeros(decoder, size)

    def __len__(self) -> int:
        return len(self.owners)

    def add(self, owner: Owner, states: list[State] | None = None, position: int = 0) -> int:
        """A row for `owner`: zeroed, or with a copy of `states` (each without B), which have seen `position` tokens."""
        assert len(self.owners) < self.size
        row = len(self.owners)
        for at, array in enumerate(self._front):
            array[row] = 0 if states is None else states[at]
        self.positions[row] = position
        self.owners.append(owner)
        return row

    def remove(self, row: int) -> int | None:
        """Free a row. Returns the row that was moved into its place, None if it was the last."""
        last = len(self.owners) - 1
        if row != last:
            for array in self._front:
                array[row] = array[last]
            self.positions[row] = self.positions[last]
            self.owners[row] = self.owners[last]
        self.owners.pop()
        return last if row != last else None

    def state(self, row: int) -> list[State]:
        """A copy of a row's states, each without B."""
        return [array[row].copy() for array in self._front]

    def views(self) -> tuple[list[State], list[State]]:
        """What a step over all rows in use reads, and what it writes."""
        rows = len(self.owners)
        return [array[:rows] for array in self._front], [array[:rows] for array in self._back]

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
                raise WrongOwner(f"slot {row} belongs to somebody else")
            if self.positions[row] != position:
                raise WrongOwner(f"slot {row} is at position {self.positions[row]}, its owner at {position}")
