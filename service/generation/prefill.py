"""Prompts on their way into states: in pieces, the short ones together, equal ones once.

A piece is so small that those who stream wait for it about as long as for a step of their own. The pieces go in turn to the prompt that has
waited longest and to the one that is nearest its end, so that a long prompt neither blocks short ones nor starves.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.generation.averages import averaged
from service.generation.sampling import logprobs_of
from service.generation.sequence import Sequence
from service.generation.session import Ids, Logits, State, StepSession, beginning
from service.generation.slots import Row, Slots

LEAST_PIECE, _MOST_PIECE = 16, 1024  # tokens of prompts in one call
_PIECE_STEPS = 1.0  # how many decode steps a piece may take the time of, while others stream
_WITH_LOGPROBS = 64  # the most where logits of every position are wanted: V numbers each


@dataclass(eq=False)
class Prompt:
    """Tokens to be fed for one run, or for several that asked for the same ones while it was under way."""

    tokens: tuple[int, ...]
    n_top: int | None  # prompt_logprobs
    order: int  # of arrival
    shared: bool  # it begins with an empty state, so that others may join
    position: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    slots: "Slots[Prompt] | None" = None  # of one row; None: nothing was fed yet
    before: NDArray[np.float32] | None = None  # logits (V,) of the last token fed, where log-probabilities need them

    @property
    def left(self) -> int:
        return len(self.tokens) - self.position


@dataclass(frozen=True)
class Fed:
    """A prompt that is done: its runs, where their state is, and the logits (V,) of their first token."""

    sequences: list[Sequence]
    states: Row
    logits: NDArray[np.float32]


class Prefill:
    """Prompts being fed, in order of arrival."""

    def __init__(self, session: StepSession[Any]) -> None:
        self._session = session
        self._prompts: list[Prompt] = []
        self._turn = 0
        self.token_s = 0.0  # moving average of a token's time

    def __len__(self) -> int:
        """Runs, each of which needs a slot in the end."""
        return sum(len(prompt.sequences) for prompt in self._prompts)

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for prompt in self._prompts for sequence in prompt.sequences]

    def add(self, sequence: Sequence, states: Iterable[State] | None) -> None:
        """Begin with a prompt, or go on with one from `states` that have seen `sequence.position` tokens of it."""
        request = sequence.request
        if states is None and (found := self._under_way(sequence)) is not None:
            found.sequences.append(sequence)
            sequence.position = sequence.run.usage.cached_tokens = found.position
            sequence.run.prompt_logprobs.extend(found.sequences[0].run.prompt_logprobs)
            return
        prompt = Prompt(request.prompt, request.prompt_logprobs, sequence.order, states is None, sequence.position, [sequence])
        if states is not None:
            prompt.slots = Slots(self._session, 1)
            prompt.slots.add(prompt, list(states), prompt.position)
        self._prompts.append(prompt)

    def remove(self, sequence: Sequence) -> None:
        """The run goes; its prompt too, if nobody else wants it."""
        prompt = self._of(sequence)
        prompt.sequences.remove(sequence)
        if not prompt.sequences:
            self._prompts.remove(prompt)

    def states(self, sequence: Sequence) -> list[State]:
        """A copy, without B."""
        slots = self._of(sequence).slots
        return beginning(self._session.decoder) if slots is None else slots.state(0)

    def budget(self, step_s: float | None) -> int:
        """Tokens to feed before the next step: what takes about as long as `step_s`, that of those who stream. None: nobody does."""
        if step_s is None or not self.token_s:
            return _MOST_PIECE
        return max(LEAST_PIECE, min(_MOST_PIECE, int(_PIECE_STEPS * step_s / self.token_s)))

    def next(self, budget: int) -> tuple[list[Prompt], int]:
        """Whose turn it is, and how many tokens of each: a piece of one, or several that end with it."""
        self._turn += 1
        first = min(self._prompts, key=lambda prompt: prompt.order if self._turn % 2 else prompt.left)
        size = min(first.left, budget, _MOST_PIECE if first.n_top is None else _WITH_LOGPROBS)
        if not _short(first, size):
            return [first], size
        width = max(size, LEAST_PIECE)
        others = (prompt for prompt in self._prompts if prompt is not first and _short(prompt, width))
        together = [first, *islice(others, max(budget // width - 1, 0))]
        return together, max(prompt.left for prompt in together)

    def feed(self, prompts: list[Prompt], size: int) -> list[Fed]:
        """Each prompt `size` tokens further, or to its end where that is nearer. Those that are done are given, and gone."""
        started = time.perf_counter()
        slots = self._slots_of(prompts)
        lengths: Ids = np.array([min(size, prompt.left) for prompt in prompts], np.int64)
        tokens: Ids = np.zeros((len(prompts), size), np.int64)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt.tokens[prompt.position : prompt.position + length]
        slots.check(prompts, [prompt.position for prompt in prompts])
        every = prompts[0].n_top is not None  # and then it is alone
        wanted: Ids = np.arange(size, dtype=np.int64)[None] if every else lengths[:, None] - 1
        logits = self._session.run(tokens, lengths, slots.positions[: len(prompts)], wanted, *slots.sets)
        slots.stepped(lengths)
        self.token_s = averaged(self.token_s, (time.perf_counter() - started) / tokens.size)
        if every:
            _tell(prompts[0], tokens[0].tolist(), logits[0])
        done: list[Fed] = []
        for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
            prompt.position += length
            for sequence in prompt.sequences:
                sequence.position = prompt.position
            if not prompt.left:
                self._prompts.remove(prompt)
                done.append(Fed(prompt.sequences, Row(slots, row), logits[row, -1]))
        return done

    def _under_way(self, sequence: Sequence) -> Prompt | None:
        asked = sequence.request
        alike = (each for each in self._prompts if each.shared and each.n_top == asked.prompt_logprobs and each.tokens == asked.prompt)
        return next(alike, None)

    def _of(self, sequence: Sequence) -> Prompt:
        return next(prompt for prompt in self._prompts if sequence in prompt.sequences)

    def _slots_of(self, prompts: list[Prompt]) -> Slots[Prompt]:
        """A single prompt keeps its state from piece to piece; several begin and end with this call."""
        if len(prompts) == 1 and prompts[0].slots is not None:
            return prompts[0].slots
        slots: Slots[Prompt] = Slots(self._session, len(prompts))
        for prompt in prompts:
            slots.add(prompt)
        if len(prompts) == 1:
            prompts[0].slots = slots
        return slots


def _short(prompt: Prompt, size: int) -> bool:
    """It has not begun, and a piece of this size is all of it."""
    return prompt.slots is None and prompt.n_top is None and prompt.left <= size


def _tell(prompt: Prompt, piece: list[int], logits: Logits) -> None:
    """The log-probability of each token of the piece, under the logits (N, V) of the one before it."""
    told = [None] if prompt.before is None else []
    rows, tokens = (logits[:-1], piece[1:]) if prompt.before is None else (np.concatenate([prompt.before[None], logits[:-1]]), piece)
    logprobs = [*told, *logprobs_of(rows, tokens, prompt.n_top or 0)]
    for sequence in prompt.sequences:
        sequence.run.prompt_logprobs.extend(logprobs)
    prompt.before = logits[-1].copy()
