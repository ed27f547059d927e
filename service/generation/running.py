"""The runs that are generating. Each has a row in the states, the logits, the sampler and the drawn tokens; used rows come first."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.sampling.sampler import Drawn, Sampler
from service.generation.sequence import Sequence
from service.generation.session import Ids, StepSession, Tensor
from service.generation.slots import Row, Slots
from service.states.validity import not_finite


class Running:
    """The batch of sequences that are being generated, one row for each.

    A decoding step is three calls: `draw` samples a token for every row, `remove` takes out each finished sequence, and `step` feeds the
    drawn tokens to the model, which computes the next logits.
    """

    def __init__(self, session: StepSession[Any], size: int) -> None:
        self.sequences: list[Sequence] = []  # by row
        self._session = session
        self._slots: Slots[Sequence] = Slots(session, size)
        self._batches = [min(session.batch(rows), size) for rows in range(size + 1)]  # batch size of a step, by number of rows in use
        self._sampler = Sampler(session.vocab_size, size)
        self._logits = np.zeros((size, session.vocab_size), np.float32)  # logits of each row's next token
        self._tokens: Ids = np.zeros((size, 1), np.int64)  # each row's token that was drawn and not yet fed to the model
        self._ones, self._zeros = np.ones(size, np.int64), np.zeros((size, 1), np.int64)
        self._calls: dict[tuple[int, bool], Callable[[], None]] = {}  # (batch size, `Slots.flipped`) -> the function that runs the step
        self._moved = 0  # `Slots.moved` when the functions were made

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, states: Several[Tensor] | Row, logits: NDArray[np.float32]) -> None:
        """Add a row for a run, with its state and the logits (V,) from which its next token is drawn."""
        row = self._slots.add(sequence, states, sequence.position)
        self.sequences.append(sequence)
        self._logits[row] = logits
        asked = sequence.request
        self._sampler.go_on(row, asked.sampling, sequence.edits, position=sequence.position, top_logprobs=asked.top_logprobs)

    def remove(self, sequence: Sequence) -> None:
        row = self.sequences.index(sequence)
        moved = self._slots.remove(row)
        if moved is not None:
            self.sequences[row] = self.sequences[moved]
            self._sampler.move(moved, row)
            self._logits[row] = self._logits[moved]
            self._tokens[row] = self._tokens[moved]
        self.sequences.pop()

    def copy(self, sequence: Sequence) -> tuple[list[Tensor], NDArray[np.float32]]:
        """Return copies of a run's state tensors, each without the batch axis, and of the logits (V,) of its next token. Call it between
        two steps.
        """
        row = self.sequences.index(sequence)
        return self._slots.state(row), self._logits[row].copy()

    def draw(self) -> Drawn:
        """Sample the next token of every row. The grammar masks must be ready."""
        masks = {row: sequence.mask.result() for row, sequence in enumerate(self.sequences) if sequence.mask is not None}
        rows = len(self.sequences)
        drawn = self._sampler.draw(self._logits[:rows], masks=masks, banned=[sequence.banned for sequence in self.sequences])
        self._tokens[:rows, 0] = drawn.token_ids
        return replace(drawn, failures={row: self._why(row, error) for row, error in drawn.failures.items()}) if drawn.failures else drawn

    def _why(self, row: int, error: ServiceError) -> ServiceError:
        """Return the error of a row for which no token could be drawn. If its grammar failed, the error has the grammar's reason. If its
        logits are not finite, the error depends on whether the run began at a stored state."""
        sequence = self.sequences[row]
        if isinstance(error, RuntimeFailed):
            return not_finite(sequence.position, began=sequence.request.start is not None)
        matcher = sequence.matcher
        if matcher is None or not isinstance(error, InvalidRequest) or (failure := matcher.failure) is None:
            return error
        return InvalidRequest(f"the grammar cannot be followed any further: {failure}", param="grammar")

    def step(self) -> None:
        """Feed every row the token that was drawn for it."""
        used = len(self.sequences)
        rows = self._batches[used]
        self._slots.check(self.sequences, [sequence.position for sequence in self.sequences])
        self._slots.reserve(1)
        if self._moved != self._slots.moved:
            self._calls.clear()
            self._moved = self._slots.moved
        call = self._calls.get(key := (rows, self._slots.flipped))
        if call is None:
            bound = self._tokens[:rows], self._ones[:rows], self._slots.positions[:rows], self._zeros[:rows], *self._slots.sets
            call = self._calls[key] = self._session.bind(*bound, self._logits[:rows, None])
        call()
        self._slots.stepped(self._ones[:used])
        for sequence in self.sequences:
            sequence.position += 1
