"""Memory for the states of many sequences, bound directly to the step graph.

There are two or more sets of states, in a ring. A step reads one set and writes the next, so no step copies states. Tensors with slots for
tokens are updated in place, so all sets have the same memory for them; it grows with the longest sequence. The rows in use are the first
ones, so the rows of a batch are a view of the arrays. When a row is freed, the last row in use is copied into its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from service.generation.session import Ids, States, StepSession, Tensor

Owner = TypeVar("Owner")


class WrongOwner(RuntimeError):
    """The position of a row is not the position that its owner expects: the row contains another run's state, or a step was lost."""


@dataclass(frozen=True)
class Row:
    """A reference to a row of some `Slots`. Valid until these slots are used again."""

    slots: "Slots[Any]"
    at: int


class Slots(Generic[Owner]):
    """Up to `size` rows of states, each with its owner and its position (the number of tokens fed to it)."""

    def __init__(self, session: StepSession[Any], size: int) -> None:
        self.size = size
        self.owners: list[Owner] = []
        self.positions: Ids = np.zeros(size, np.int64)
        self.at = 0  # number of the set that has the current states
        self.moved = 0  # how many times the memory of the states has moved, or the ring has changed
        self._session = session
        self._sets: list[States] = [session.states(size), session.states(size)]
        self._sets[1].share(self._sets[0])

    def __len__(self) -> int:
        return len(self.owners)

    def lengthen(self, n_sets: int) -> None:
        """Have at least this number of sets, so that `n_sets` - 1 steps can be made before the states of the first are given up."""
        while len(self._sets) < n_sets:
            self._sets.insert(self.at + 1, self._session.states(self.size))
            self._sets[self.at + 1].share(self._front)
            self.moved += 1

    @property
    def _front(self) -> States:
        return self._sets[self.at]

    def _set(self, after: int) -> Any:
        """Return the set that has the states after this number of further steps, or before the last step if it is -1."""
        return self._sets[(self.at + after) % len(self._sets)]

    def add(self, owner: Owner, states: Sequence[Tensor] | Row | None = None, position: int = 0) -> int:
        """Add a row for `owner`: the empty state, or a copy of `states` (each without the batch axis) at `position`. Returns the row's
        index.
        """
        assert len(self.owners) < self.size
        row = len(self.owners)
        self._reserve(max(position, self._longest))
        if isinstance(states, Row):
            self._front.copy(row, states.slots._front, states.at, position)
        else:
            self._front.put(row, states)
        self.positions[row] = position
        self.owners.append(owner)
        return row

    def remove(self, row: int, *, undoable: bool = False, ahead: int = 0) -> int | None:
        """Free a row. Returns the index of the row that was moved into its place, or None if it was the last row. With `undoable`, the
        moved row's state before the last step is moved too, so that `take_back` can undo the step; so are its states after `ahead` steps
        that were made before they are taken.
        """
        last = len(self.owners) - 1
        if row != last:
            for after in range(-1 if undoable else 0, ahead + 1):
                states = self._set(after)
                states.copy(row, states, last, int(self.positions[last]))
            self.positions[row] = self.positions[last]
            self.owners[row] = self.owners[last]
        self.owners.pop()
        if not self.owners:
            self._reserve(0)  # gives memory back, as no sequence may follow for long
        return last if row != last else None

    def take_back(self, row: int, tokens: int) -> None:
        """Undo the last step for a row: it fed `tokens` tokens to it. Call it before the next step. States that a step updates in place
        cannot be undone.
        """
        self._front.copy(row, self._set(-1), row, int(self.positions[row]))
        self.positions[row] -= tokens

    def before(self, row: int) -> list[Tensor]:
        """Return a copy of a row's state tensors before the last step, each without the batch axis."""
        return list(self._set(-1).read(row, int(self.positions[row])))

    def state(self, row: int) -> list[Tensor]:
        """Return a copy of a row's state tensors, each without the batch axis."""
        return self._front.read(row, int(self.positions[row]))

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens in every row, or give memory back. Call this before `sets`."""
        self._reserve(self._longest + tokens)

    @property
    def _longest(self) -> int:
        return int(self.positions[: len(self.owners)].max(initial=0))

    def _reserve(self, position: int) -> None:
        if self._front.reserve(position, len(self.owners)):
            for states in self._sets:
                if states is not self._front:
                    states.share(self._front)
            self.moved += 1

    @property
    def sets(self) -> tuple[Any, Any]:
        """Return the states that the next step reads, and those that it writes, of the session's own type. The rows in use come first."""
        return self.sets_after(0)

    def sets_after(self, steps: int) -> tuple[Any, Any]:
        """Return the same for the step after this number of steps."""
        return self._set(steps), self._set(steps + 1)

    def stepped(self, lengths: Ids) -> None:
        """Go to the next set of states, as a step has fed `lengths` tokens to the rows in use, and advance their positions."""
        self.at = (self.at + 1) % len(self._sets)
        self.positions[: len(self.owners)] += lengths

    def check(self, owners: Sequence[Owner], positions: Sequence[int]) -> None:
        """Raise WrongOwner unless each row in use has the expected owner and position."""
        if self.owners == owners and self.positions[: len(owners)].tolist() == positions:
            return
        for row, (owner, position) in enumerate(zip(self.owners, positions, strict=True)):
            if owner != owners[row]:
                raise WrongOwner(f"slot {row} belongs to another run")
            if self.positions[row] != position:
                raise WrongOwner(f"slot {row} is at position {self.positions[row]}, its owner at {position}")
