"""The runs that are generating. Each has a row in the states, the logits, the sampler and the drawn tokens; used rows come first.

A step may also feed guessed tokens to a row (see `sampling/guesses.py`). If a guess turns out to be wrong, the row gets back its state
before the step, and the next step feeds the right tokens again.

Several steps can be made by one call, if all their tokens can be drawn ahead. They are taken one after the other: only then do rows have
the logits and states after them. So what ends between two of them ends as if no further step had been made.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidRequest, RuntimeFailed, ServiceError
from service.generation.sampling.guesses import MOST_PLACES, WIDTH, Guesses, Worth
from service.generation.sampling.sampler import COLDEST, Drawn, Sampler
from service.generation.sequence import Sequence
from service.generation.session import Ids, Step, StepSession, Tensor, Then
from service.generation.slots import Row, Slots
from service.runtime.onnx import CPU
from service.states.validity import not_finite

_MOST_BYTES = 64 * 2**20  # most memory for the logits of guessed tokens, or for what steps of one call need; else there are none
_MOST_CALLS = 128  # most calls whose bound arrays are kept; one takes up to 0.1 MB
MOST_STEPS = 4  # most steps of one call


class StepPlan(NamedTuple):
    """What one call of the step graph does. Calls with equal plans use the same memory, so they are bound once."""

    rows: int  # batch size, at least the rows in use
    width: int  # most tokens that a row is fed in a step
    steps: int  # number of steps, one after the other
    draws: bool  # whether each step also draws the next tokens, on the core that computes their logits
    flipped: bool  # which of the two sets of states is read; see `Slots.flipped`


@dataclass(eq=False)
class _Arrays:
    """The inputs and logits of a step that feeds up to N tokens to each of S rows."""

    tokens: Ids  # (S, N)
    lengths: Ids  # (S,)
    positions: Ids  # (S,)
    wanted: Ids  # (S, N)
    logits: NDArray[np.float32]  # (S, N, V)

    @classmethod
    def of(cls, tokens: Ids, positions: Ids, vocab_size: int) -> "_Arrays":
        size, width = tokens.shape
        wanted = np.tile(np.arange(width, dtype=np.int64), (size, 1))
        return cls(tokens, np.ones(size, np.int64), positions, wanted, np.zeros((size, width, vocab_size), np.float32))

    def step(self, rows: int, states: Any, out: Any, then: Then | None) -> Step:
        """Return the step of the first rows, from `states` to `out`."""
        return Step(
            self.tokens[:rows], self.lengths[:rows], self.positions[:rows], self.wanted[:rows], states, out, self.logits[:rows], then
        )


@dataclass(eq=False)
class _Feed:
    """The difference between the tokens that a row's state contains and those of its run."""

    unfed: list[int] = field(default_factory=list)  # right tokens that the state lost when a step was undone, and that are fed again
    guessing: list[int] = field(default_factory=list)  # tokens of the last step, if guesses at their end are not yet verified; else empty
    n_right: int = 0  # how many of `guessing` are the run's tokens
    logits: NDArray[np.float32] | None = None  # (N, V) logits after each token of `guessing`


class Running:
    """The batch of sequences that are being generated, one row for each.

    A decoding step is four calls: `draw` samples a token for every row, `remove` takes out each finished sequence, `verify` returns the
    rows that can draw again because they drew what was guessed, and `step` feeds the drawn tokens to the model, which computes the next
    logits. While `ahead` is above 0, `take` does what `step` does, by a step that was made before.
    """

    def __init__(self, session: StepSession[Any], size: int) -> None:
        self.sequences: list[Sequence] = []  # by row
        self.step_s = 0.0  # how long a step of the last call of the graph took
        self.ahead = 0  # number of steps that were made and not taken
        self._session = session
        self._slots: Slots[Sequence] = Slots(session, size)
        self._batches = [min(session.batch(rows), size) for rows in range(size + 1)]  # batch size of a step, by number of rows in use
        self._on_cpu = session.provider == CPU
        in_place = any(state.slots for state in session.decoder.states)
        # All steps of a call have states and logits of their own. Where states are updated in place, those between two steps are lost.
        bytes_of_step = size * (session.decoder.state_bytes + 4 * session.vocab_size)
        self._most_steps = min(MOST_STEPS, 1 + _MOST_BYTES // bytes_of_step) if self._on_cpu and not in_place else 1
        # Elsewhere, a guess could change the bits of the logits, or a step that updates states in place could not be undone.
        bytes_of_guesses = sum(range(2, WIDTH + 1)) * 4 * size * session.vocab_size
        self._guesses = self._on_cpu and session.decoder.exact and not in_place and bytes_of_guesses <= _MOST_BYTES
        self._worth = Worth()
        self._feeds: list[_Feed] = []  # by row
        self._sampler = Sampler(session.vocab_size, size, self._most_steps)
        # The steps of a call that feeds one token to a row. The first is fed the drawn tokens, the others those of the draw before.
        tokens: Ids = np.zeros((size, 1), np.int64)
        self._steps = [_Arrays.of(tokens, self._slots.positions, session.vocab_size)]
        self._wide: dict[int, _Arrays] = {}  # the step that feeds more tokens to a row, by their number
        self._layer = 0  # which of `_steps` has the logits of the next token
        self._calls: dict[StepPlan, Callable[[], None]] = {}
        self._moved = 0  # `Slots.moved` when the calls were bound

    @property
    def _logits(self) -> NDArray[np.float32]:
        """The logits of each row's next token, (S, V)."""
        return self._steps[self._layer].logits[:, 0]

    @property
    def _tokens(self) -> Ids:
        """Each row's token that was drawn and not yet fed to the model, (S,)."""
        return self._steps[0].tokens[:, 0]

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
        self._sampler.put(row, asked.sampling, sequence.edits, position=sequence.position, top_logprobs=asked.top_logprobs)
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
            for step in self._steps[self._layer : self._layer + self.ahead + 1]:
                step.logits[row] = step.logits[moved]
            self._tokens[row] = self._tokens[moved]
        self.sequences.pop()
        self._feeds.pop()
        if not self.sequences:
            self.ahead = 0

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
            self._tokens[:rows] = drawn.token_ids
        else:
            self._tokens[:rows][chosen] = drawn.token_ids[chosen]
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

    def verify(self) -> list[Sequence]:
        """Compare the drawn tokens with the guessed ones, after the finished sequences were removed. Return the sequences whose next token
        can be drawn before the next step.
        """
        again: list[Sequence] = []
        for row, (sequence, feed) in enumerate(zip(self.sequences, self._feeds, strict=True)):
            if feed.logits is None:
                continue
            n_fed = len(feed.guessing)
            if feed.guessing[feed.n_right] == self._tokens[row]:
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

    def step(self, *, most: int = 1) -> int:
        """Feed every row the token that was drawn for it, and guessed tokens if this pays. Return the number of guessed tokens. Make up to
        `most` steps in one call, of which the first is taken.
        """
        guesses = self._proposed() if self._guesses else {}
        started = time.perf_counter()
        wide = bool(guesses) or any(feed.unfed for feed in self._feeds)
        used, n_steps = len(self.sequences), 1 if wide else self._n_steps(most)
        arrays = [self._written(guesses)] if wide else self._following(n_steps)
        # On a GPU the step's rows are more than those in use, and no core of the host is left to draw the others.
        draws = not wide and self._on_cpu and self._sampler.begin_ahead(used, n_steps)
        self._run(arrays, draws=draws)
        self._layer, self.ahead = 0, n_steps - 1
        self._slots.stepped(arrays[0].lengths[:used], n_steps=n_steps)
        if wide:
            self._read(arrays[0], guesses)
        self._advance()
        if self._guesses:
            self._worth.took(used, (time.perf_counter() - started) / n_steps, guessing=wide)
        return sum(map(len, guesses.values()))

    def _n_steps(self, most: int) -> int:
        """Return how many steps the next call makes: at most `most`, and as many as each row may still draw tokens; 1 if some token cannot
        be drawn ahead.
        """
        most = min(most, self._most_steps)
        if most == 1 or not self._sampler.all_ahead(len(self.sequences)):
            return 1
        if any(sequence.mask is not None or sequence.banned for sequence in self.sequences):
            return 1
        return max(1, min(most, *(sequence.most - len(sequence.completion) for sequence in self.sequences)))

    def take(self) -> None:
        """Take the next step that was made: each row's drawn token is the one that this step fed."""
        self.ahead -= 1
        self._layer += 1
        self._slots.take(self._steps[0].lengths[: len(self.sequences)])
        self._advance()

    def _advance(self) -> None:
        for sequence in self.sequences:
            sequence.position += 1

    def _proposed(self) -> dict[int, list[int]]:
        """Return the guessed tokens of each row that has a guess, or nothing if the guesses would not pay."""
        guesses: dict[int, list[int]] = {}
        right = 0.0
        for row, sequence in enumerate(self.sequences):
            if sequence.guesses is None:
                continue
            most = min(WIDTH - 1 - len(self._feeds[row].unfed), sequence.most - len(sequence.completion) - 1)
            if most > 0 and (guess := sequence.guesses.propose(most)):
                guesses[row] = guess
                right += min(sequence.guesses.right, len(guess))
        return guesses if guesses and self._worth.pays(len(self.sequences), right) else {}

    def _following(self, n_steps: int) -> list[_Arrays]:
        """Return the arrays of this number of steps, each of which feeds one token to a row."""
        positions = self._slots.positions
        for number in range(1, n_steps):
            if number == len(self._steps):
                self._steps.append(_Arrays.of(self._sampler.token_ids(number - 1), np.zeros_like(positions), self._session.vocab_size))
            np.add(positions, number, out=self._steps[number].positions)
        return self._steps[:n_steps]

    def _written(self, guesses: dict[int, list[int]]) -> _Arrays:
        """Return the arrays of a step that feeds several tokens to a row: those that were taken back from it, the drawn one, its guess."""
        drawn = self._tokens[: len(self.sequences)].tolist()
        fed = [[*feed.unfed, token, *guesses.get(row, ())] for row, (feed, token) in enumerate(zip(self._feeds, drawn, strict=True))]
        width = max(map(len, fed))
        if (wide := self._wide.get(width)) is None:
            tokens: Ids = np.zeros((self._slots.size, width), np.int64)
            wide = self._wide[width] = _Arrays.of(tokens, self._slots.positions, self._session.vocab_size)
        for row, tokens_of_row in enumerate(fed):
            wide.tokens[row, : len(tokens_of_row)] = tokens_of_row
            wide.lengths[row] = len(tokens_of_row)
        return wide

    def _read(self, wide: _Arrays, guesses: dict[int, list[int]]) -> None:
        """Take the logits of a step that fed several tokens to a row."""
        for row, feed in enumerate(self._feeds):
            n_right = len(feed.unfed) + 1
            self._logits[row] = wide.logits[row, n_right - 1]
            fed = wide.tokens[row, : wide.lengths[row]].tolist() if row in guesses else []
            self._feeds[row] = _Feed(guessing=fed, n_right=n_right, logits=wide.logits[row]) if fed else _Feed()

    def _run(self, arrays: Several[_Arrays], *, draws: bool) -> None:
        """Make the call of one step for each of `arrays`."""
        assert not self.ahead
        in_state = [sequence.position - len(feed.unfed) for sequence, feed in zip(self.sequences, self._feeds, strict=True)]
        self._slots.check(self.sequences, in_state)
        plan = StepPlan(self._batches[len(self.sequences)], arrays[0].tokens.shape[1], len(arrays), draws, self._slots.flipped)
        self._slots.reserve(plan.width)
        if self._moved != self._slots.moved:
            self._calls.clear()
            self._moved = self._slots.moved
        if (call := self._calls.get(plan)) is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            thens = [self._sampler.ahead(each.logits[:, 0], number) if draws else None for number, each in enumerate(arrays)]
            states = zip(pairwise(self._slots.path(plan.steps)), arrays, thens, strict=True)
            steps = [each.step(plan.rows, before, after, then) for (before, after), each, then in states]
            call = self._calls[plan] = self._session.bind(*steps)
        started = time.perf_counter()
        call()
        self.step_s = (time.perf_counter() - started) / plan.steps
