"""Memory for the states of many sequences, bound directly to the step graph.

There are two sets of states. A step reads one set and writes the other, then they are swapped, so no step copies states. Several steps
that are made at once go through further sets on their way from one to the other. Tensors with slots for tokens are updated in place, so
both sets have the same memory for them; it grows with the longest sequence. The rows in use are the first ones, so the rows of a batch are
a view of the arrays. When a row is freed, the last row in use is copied into its place.
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
        self.flipped = False  # toggled each time the two sets are swapped
        self.moved = 0  # how many times the memory of the states has moved
        self._session = session
        self._front: States = session.states(size)
        self._back: States = session.states(size)
        self._back.share(self._front)
        self._further: list[States] = []
        self._ahead: list[States] = []  # the sets that have the states after each step that was made and not taken

    def __len__(self) -> int:
        return len(self.owners)

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

    def remove(self, row: int, *, undoable: bool = False) -> int | None:
        """Free a row. Returns the index of the row that was moved into its place, or None if it was the last row. With `undoable`, the
        moved row's state before the last step is moved too, so that `take_back` can undo the step.
        """
        last = len(self.owners) - 1
        if row != last:
            for states in (self._front, *self._ahead, *([self._back] if undoable else [])):
                states.copy(row, states, last, int(self.positions[last]))
            self.positions[row] = self.positions[last]
            self.owners[row] = self.owners[last]
        self.owners.pop()
        if not self.owners:
            if self._ahead:  # `flipped` already means that the last of them is in front
                self._front, self._ahead = self._ahead[-1], []
            self._reserve(0)  # gives memory back, as no sequence may follow for long
        return last if row != last else None

    def take_back(self, row: int, tokens: int) -> None:
        """Undo the last step for a row: it fed `tokens` tokens to it. Call it before the next step. States that a step updates in place
        cannot be undone.
        """
        self._front.copy(row, self._back, row, int(self.positions[row]))
        self.positions[row] -= tokens

    def before(self, row: int) -> list[Tensor]:
        """Return a copy of a row's state tensors before the last step, each without the batch axis."""
        return self._back.read(row, int(self.positions[row]))

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
            self._back.share(self._front)
            self.moved += 1

    @property
    def sets(self) -> tuple[Any, Any]:
        """Return the states that the next step reads, and those that it writes, of the session's own type. The rows in use come first."""
        return self._front, self._back

    def path(self, steps: int) -> list[Any]:
        """Return the states before the first and after each of this number of steps that are made at once. If they are several, no tensor
        may have slots.
        """
        while len(self._further) < steps - 1:
            self._further.append(self._session.states(self.size))
        return [self._front, *self._further[: steps - 1], self._back]

    def stepped(self, lengths: Ids, *, n_steps: int = 1) -> None:
        """Swap the two sets of states after a step that fed `lengths` tokens to the rows in use, and advance their positions. If `n_steps`
        were made at once, `take` goes on to those after the first.
        """
        before, *self._ahead, after = self.path(n_steps)
        self._ahead.append(after)
        self.flipped = not self.flipped
        self._back = before
        self.take(lengths)

    def take(self, lengths: Ids) -> None:
        """Go on to the states after the next step that was made, which fed `lengths` tokens to the rows in use."""
        self._front = self._ahead.pop(0)
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
