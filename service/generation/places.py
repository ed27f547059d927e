"""Records where each run with a slot is: in prefill, in the decode batch, or late (waiting for the grammar mask of its next token)."""

from collections.abc import Sequence as Several
from typing import Any

from service.generation.prefill import Prefill
from service.generation.running import Running
from service.generation.sequence import Sequence
from service.generation.session import Logits, StepSession, Tensor
from service.generation.state import State


class Places:
    """The places of an engine's runs, with the states that are kept when a run leaves the decode batch. Used on the engine's thread."""

    def __init__(self, session: StepSession[Any], slots: int) -> None:
        self.running = Running(session, slots)
        self.prefill = Prefill(session)
        self.late: list[Sequence] = []  # runs that skip decode steps until their grammar masks are ready
        self._session = session

    def __len__(self) -> int:
        """Return the number of runs that have a slot."""
        return len(self.running) + len(self.late) + len(self.prefill)

    @property
    def sequences(self) -> list[Sequence]:
        """Return the runs that have a slot."""
        return [*self.running.sequences, *self.late, *self.prefill.sequences]

    def put(self, sequence: Sequence) -> None:
        """Give a run its slot: in the decode batch if its prompt is done, else in the prefill."""
        if not sequence.left_of_prompt:
            self.decode(sequence)
        elif sequence in self.prefill:
            self.prefill.back(sequence)
        else:
            self.prefill.add(sequence)
        sequence.placed_at = sequence.position

    def decode(self, sequence: Sequence) -> None:
        """Add a run whose prompt is done to the decode batch, with the state that was kept."""
        state, sequence.state = sequence.state, None
        assert state is not None
        assert state.logits is not None
        self.running.join(sequence, state.tensors, state.logits)

    def hold(self, sequence: Sequence) -> None:
        """Remove a run from the decode batch and keep its state."""
        sequence.state = self.copy(sequence)
        self.running.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a run that has ended from prefill, decode batch or late runs, if it is in one of them."""
        if sequence in self.running.sequences:
            self.running.remove(sequence)
        elif sequence in self.late:
            self.late.remove(sequence)
        elif sequence in self.prefill:
            self.prefill.remove(sequence)

    def copy(self, sequence: Sequence) -> State:
        """Return a copy of the state of a run whose prompt is done."""
        if sequence in self.running.sequences:
            return self.state(sequence, *self.running.copy(sequence))
        assert sequence.state is not None
        return sequence.state

    def state(self, sequence: Sequence, tensors: Several[Tensor], logits: Logits | None = None) -> State:
        """Return a State of the run at its position, with these state tensors (each without the batch axis) and logits (V,)."""
        return State(tensors=tuple(tensors), position=sequence.position, logits=logits, fingerprint=self._session.fingerprint)
