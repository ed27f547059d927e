"""The runs that are generating. Each has a row in the states, the logits, the sampler and the drawn tokens; used rows come first.

A step may also feed guessed tokens to a row (see `sampling/guesses.py`). If a guess turns out to be wrong, the row gets back its state
before the step, and the next step feeds the right tokens again.

Several steps can be made by one call, if all their tokens can be drawn ahead. They are taken one after the other: only then do rows have
the logits and states after them. So what ends between two of them ends as if no further step had been made.
"""

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.sampling.guesses import MOST_PLACES, WIDTH, Guesses, Worth
from service.generation.sampling.sampler import COLDEST, Drawn, Sampler
from service.generation.sequence import Sequence
from service.generation.session import Ids, Step, StepSession, Tensor
from service.generation.slots import Row, Slots
from service.runtime.onnx import CPU
from service.states.validity import not_finite

_MOST_BYTES = 64 * 2**20  # most memory for the logits of guessed tokens, or for what steps of one call need; else there are none
_MOST_CALLS = 128  # most calls whose bound arrays are kept; one takes up to 0.1 MB
MOST_STEPS = 4  # most steps of one call


@dataclass(eq=False)
class _Feed:
    """The difference between the tokens that a row's state contains and those of its run."""

    unfed: list[int] = field(default_factory=list)  # right tokens that the state lost when a step was undone, and that are fed again
    guessing: list[int] = field(default_factory=list)  # tokens of the last step, if guesses at their end are not yet confirmed; else empty
    n_right: int = 0  # how many of `guessing` are the run's tokens
    logits: NDArray[np.float32] | None = None  # (N, V) logits after each token of `guessing`


class Running:
    """The batch of sequences that are being generated, one row for each.

    A decoding step is four calls: `draw` samples a token for every row, `remove` takes out each finished sequence, `confirm` returns the
    rows that can draw again because they drew what was guessed, and `step` feeds the drawn tokens to the model, which computes the next
    logits. While `ahead` is above 0, `take` does what `step` does, by a step that was made before.
    """

    def __init__(self, session: StepSession[Any], size: int) -> None:
        self.sequences: list[Sequence] = []  # by row
        self._session = session
        self._slots: Slots[Sequence] = Slots(session, size)
        self._batches = [min(session.batch(rows), size) for rows in range(size + 1)]  # batch size of a step, by number of rows in use
        self._sampler = Sampler(session.vocab_size, size)
        # The logits of each row's next token, and of the tokens after it if several steps were made.
        self._layers = [np.zeros((size, session.vocab_size), np.float32)]
        self._layer = 0  # which of them has the logits of the next token
        self.ahead = 0  # number of steps that were made and not taken
        self._tokens: Ids = np.zeros((size, 1), np.int64)  # each row's token that was drawn and not yet fed to the model
        self._ones, self._zeros = np.ones(size, np.int64), np.zeros((size, 1), np.int64)
        # (batch size, `Slots.flipped`, tokens a row, steps, whether it draws) -> the call
        self._calls: dict[tuple[int, bool, int, int, bool], Callable[[], None]] = {}
        self.step_s = 0.0  # how long a step of the last call of the graph took
        self._moved = 0  # `Slots.moved` when the functions were made
        self._feeds: list[_Feed] = []  # by row
        self._wide: dict[int, _Wide] = {}  # by tokens a row
        self._on_cpu = session.provider == CPU
        in_place = any(state.slots for state in session.decoder.states)
        # Elsewhere, a guess could change the bits of the logits, or a step that updates states in place could not be undone.
        self._guesses = (
            self._on_cpu and session.decoder.exact and not in_place and sum(range(2, WIDTH + 1)) * self._layers[0].nbytes <= _MOST_BYTES
        )
        self._worth = Worth()
        # All steps of a call have states and logits of their own. Where states are updated in place, those between two steps are lost.
        bytes_of_step = size * (session.decoder.state_bytes + 4 * session.vocab_size)
        self._most_steps = min(MOST_STEPS, 1 + _MOST_BYTES // bytes_of_step) if self._on_cpu and not in_place else 1
        self._further_positions: list[Ids] = [np.zeros(size, np.int64) for _ in range(1, self._most_steps)]  # of the steps after the first

    @property
    def _logits(self) -> NDArray[np.float32]:
        return self._layers[self._layer]

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, states: Several[Tensor] | Row, logits: NDArray[np.float32]) -> None:
        """Add a row for a run, with its state and the logits (V,) from which its next token is drawn."""
        assert not self.ahead
        row = self._slots.add(sequence, states, sequence.position)
        self.sequences.append(sequence)
        self._feeds.append(_Feed())
        self._logits[row] = logits
        asked = sequence.request
        self._sampler.go_on(row, asked.sampling, sequence.edits, position=sequence.position, top_logprobs=asked.top_logprobs)
        # A grammar's masks are made one after the other, so they would wait for each other.
        if self._guesses and sequence.guesses is None and asked.sampling.temperature < COLDEST and sequence.matcher is None:
            sequence.guesses = Guesses((*asked.prompt[-MOST_PLACES:], *sequence.completion))

    def remove(self, sequence: Sequence) -> None:
        row = self.sequences.index(sequence)
        moved = self._slots.remove(row, undoable=bool(self._feeds[-1].guessing))
        if moved is not None:
            self.sequences[row] = self.sequences[moved]
            self._feeds[row] = self._feeds[moved]
            self._sampler.move(moved, row)
            for logits in self._layers[self._layer : self._layer + self.ahead + 1]:
                logits[row] = logits[moved]
            self._tokens[row] = self._tokens[moved]
        self.sequences.pop()
        self._feeds.pop()
        if not self.sequences:
            self.ahead = 0
            self._sampler.forget_ahead()

    def copy(self, sequence: Sequence) -> tuple[list[Tensor], NDArray[np.float32]]:
        """Return copies of a run's state tensors, each without the batch axis, and of the logits (V,) of its next token. Call it between
        two steps.
        """
        row = self.sequences.index(sequence)
        feed = self._feeds[row]
        if feed.guessing or feed.unfed:
            right = feed.guessing[: feed.n_right] or feed.unfed
            before = self._slots.before(row) if feed.guessing else self._slots.state(row)
            state = self._after(before, sequence.position - len(right), right)
        else:
            state = self._slots.state(row)
        return state, self._logits[row].copy()

    def _after(self, state: list[Tensor], position: int, tokens: list[int]) -> list[Tensor]:
        """Return the state after these tokens were fed to `state`, which is at `position`."""
        slots: Slots[None] = Slots(self._session, 1)
        slots.add(None, state, position)
        n = np.array([len(tokens)], np.int64)
        self._session.run(np.array([tokens], np.int64), n, slots.positions, n[:, None] - 1, *slots.sets)
        slots.stepped(n)
        return slots.state(0)

    def draw(self, only: Several[Sequence] | None = None) -> Drawn:
        """Sample the next token of every row, or of the rows of the sequences `only`. The grammar masks must be ready."""
        masks = {row: sequence.mask.result() for row, sequence in enumerate(self.sequences) if sequence.mask is not None and only is None}
        rows = len(self.sequences)
        chosen = None if only is None else np.array([sequence in only for sequence in self.sequences])
        drawn = self._sampler.draw(self._logits[:rows], masks=masks, banned=[sequence.banned for sequence in self.sequences], only=chosen)
        if chosen is None:
            self._tokens[:rows, 0] = drawn.token_ids
        else:
            self._tokens[:rows, 0][chosen] = drawn.token_ids[chosen]
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

    def confirm(self, ending: Collection[Sequence]) -> list[Sequence]:
        """Compare the drawn tokens with the guessed ones, after the finished sequences were removed. Return the sequences whose next token
        can be drawn before the next step. The sequences `ending` draw no more.
        """
        again: list[Sequence] = []
        for row, (sequence, feed) in enumerate(zip(self.sequences, self._feeds, strict=True)):
            if feed.logits is None:
                continue
            n_fed = len(feed.guessing)
            if feed.guessing[feed.n_right] == self._tokens[row, 0] and sequence not in ending:
                self._logits[row] = feed.logits[feed.n_right]
                feed.n_right += 1
                sequence.position += 1
                again.append(sequence)
                if feed.n_right == n_fed:
                    self._feeds[row] = _Feed()
            else:
                self._slots.take_back(row, n_fed)
                self._feeds[row] = _Feed(unfed=feed.guessing[: feed.n_right])
        return again

    def step(self, ending: Collection[Sequence] = (), *, most: int = 1) -> int:
        """Feed every row the token that was drawn for it, and guessed tokens if this pays, but not to the sequences `ending`. Return the
        number of guessed tokens. Make up to `most` steps in one call, of which the first is taken.
        """
        guesses = self._guessed(ending) if self._guesses else {}
        started = time.perf_counter()
        wide = bool(guesses) or any(feed.unfed for feed in self._feeds)
        n_steps = 1 if wide else self._steps(ending, most)
        if wide:
            self._step_wide(guesses)
        else:
            self._step_alike(n_steps)
        if self._guesses:
            self._worth.took(len(self.sequences), (time.perf_counter() - started) / n_steps, guessing=wide)
        return sum(map(len, guesses.values()))

    def _steps(self, ending: Collection[Sequence], most: int) -> int:
        """Return how many steps the next call makes: at most `most`, and as many as each row may still draw tokens; 1 if some token cannot
        be drawn ahead.
        """
        most = min(most, self._most_steps)
        if most == 1 or ending or not self._sampler.all_ahead(len(self.sequences)):
            return 1
        if any(sequence.mask is not None or sequence.banned for sequence in self.sequences):
            return 1
        return max(1, min(most, *(sequence.most - len(sequence.completion) for sequence in self.sequences)))

    def take(self) -> None:
        """Take the next step that was made: each row's drawn token is the one that this step fed."""
        self.ahead -= 1
        self._layer += 1
        self._slots.take(self._ones[: len(self.sequences)])
        self._advance()

    def _advance(self) -> None:
        for sequence in self.sequences:
            sequence.position += 1

    def _guessed(self, ending: Collection[Sequence]) -> dict[int, list[int]]:
        """Return the guessed tokens of each row that has a guess, or nothing if the guesses would not pay."""
        guesses: dict[int, list[int]] = {}
        right = 0.0
        for row, sequence in enumerate(self.sequences):
            if sequence.guesses is None or sequence in ending:
                continue
            most = min(WIDTH - 1 - len(self._feeds[row].unfed), sequence.most - len(sequence.completion) - 1)
            if most > 0 and (guess := sequence.guesses.next(most)):
                guesses[row] = guess
                right += min(sequence.guesses.right, len(guess))
        return guesses if guesses and self._worth.pays(len(self.sequences), right) else {}

    def _step_alike(self, n_steps: int) -> None:
        """Feed every row its drawn token. In further steps, feed it the token that is drawn after that."""
        used = len(self.sequences)
        # On a GPU the step's rows are more than those in use, and no core of the host is left to draw the others.
        draws = self._on_cpu and self._sampler.begin_ahead(used, n_steps)
        while len(self._layers) < n_steps:
            self._layers.append(np.zeros_like(self._layers[0]))
        positions = [self._slots.positions, *self._further_positions]
        for number in range(1, n_steps):
            np.add(self._slots.positions[:used], number, out=positions[number][:used])

        def steps(rows: int) -> list[Step]:
            path = self._slots.path(n_steps)
            return [
                Step(
                    (self._sampler.token_ids(number - 1) if number else self._tokens)[:rows],
                    self._ones[:rows],
                    positions[number][:rows],
                    self._zeros[:rows],
                    path[number],
                    path[number + 1],
                    self._layers[number][:rows, None],
                    self._sampler.ahead(self._layers[number], number) if draws else None,
                )
                for number in range(n_steps)
            ]

        self._run(steps, 1, n_steps=n_steps, draws=draws)
        self._layer, self.ahead = 0, n_steps - 1
        self._slots.stepped(self._ones[:used], n_steps=n_steps)
        self._advance()
        if draws:
            self._sampler.end_ahead(used, n_steps)

    def _step_wide(self, guesses: dict[int, list[int]]) -> None:
        """Feed several tokens to a row: those that were taken back from it, the drawn one, and its guess."""
        fed = [
            [*feed.unfed, drawn, *guesses.get(row, ())] for row, (feed, drawn) in enumerate(zip(self._feeds, self._drawn(), strict=True))
        ]
        width = max(map(len, fed))
        if (wide := self._wide.get(width)) is None:
            wide = self._wide[width] = _Wide(self._slots.size, width, self._layers[0].shape[1])
        for row, tokens in enumerate(fed):
            wide.tokens[row, : len(tokens)] = tokens
            wide.lengths[row] = len(tokens)

        def steps(rows: int) -> list[Step]:
            tokens, lengths, positions, wanted = (array[:rows] for array in (wide.tokens, wide.lengths, self._slots.positions, wide.wanted))
            return [Step(tokens, lengths, positions, wanted, *self._slots.sets, wide.logits[:rows])]

        self._run(steps, width)
        self._slots.stepped(wide.lengths[: len(fed)])
        for row, (sequence, feed, tokens) in enumerate(zip(self.sequences, self._feeds, fed, strict=True)):
            n_right = len(feed.unfed) + 1
            self._logits[row] = wide.logits[row, n_right - 1]
            self._feeds[row] = _Feed(guessing=tokens, n_right=n_right, logits=wide.logits[row]) if row in guesses else _Feed()
            sequence.position += 1

    def _drawn(self) -> list[int]:
        drawn: list[int] = self._tokens[: len(self.sequences), 0].tolist()
        return drawn

    def _run(
        self,
        steps: Callable[[int], list[Step]],
        width: int,
        *,
        n_steps: int = 1,
        draws: bool = False,
    ) -> None:
        """Make the call of `n_steps` steps of `width` tokens a row. `steps` returns them for a number of rows that begins with those in
        use.
        """
        assert not self.ahead
        rows = self._batches[len(self.sequences)]
        in_state = [sequence.position - len(feed.unfed) for sequence, feed in zip(self.sequences, self._feeds, strict=True)]
        self._slots.check(self.sequences, in_state)
        self._slots.reserve(width)
        if self._moved != self._slots.moved:
            self._calls.clear()
            self._moved = self._slots.moved
        call = self._calls.get(key := (rows, self._slots.flipped, width, n_steps, draws))
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[key] = self._session.bind(*steps(rows))
        started = time.perf_counter()
        call()
        self.step_s = (time.perf_counter() - started) / n_steps


class _Wide:
    """The inputs and logits of steps that feed up to `width` tokens to a row."""

    def __init__(self, slots: int, width: int, vocab_size: int) -> None:
        self.tokens: Ids = np.zeros((slots, width), np.int64)
        self.lengths: Ids = np.ones(slots, np.int64)
        self.wanted: Ids = np.tile(np.arange(width, dtype=np.int64), (slots, 1))
        self.logits = np.zeros((slots, width, vocab_size), np.float32)
