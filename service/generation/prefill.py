"""Prefill: feeds prompts to the model in pieces. Short prompts share a call, and equal prompts of a client are fed once.

A piece takes about as long as one decode step, so streams are hardly delayed. If no run is decoding, pieces of long prompts are short, so
that a new request is hardly delayed. Pieces alternate between the client with the fewest tokens fed (its oldest prompt first) and the
prompt with the fewest tokens left. So a long prompt neither blocks short prompts nor starves, and many prompts of one client do not delay
those of others.
"""

import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.prompt_logprobs import PromptLogprobs
from service.generation.sampling.sampler import logprobs_of
from service.generation.sequence import Sequence
from service.generation.session import Ids, Logits, StepSession, Tensor
from service.generation.slots import Row, Slots
from service.generation.state import State
from service.runtime.onnx import CPU
from service.runtime.price import Price

LEAST_PIECE, _MOST_PIECE = 16, 1024  # least and most prompt tokens in one call
# Most tokens of a piece of a long prompt if no run is decoding: while other clients have prompts too, and while none has, on a CPU. There,
# longer pieces take little less time per token, and a new request waits for the running piece.
_SHORT_PIECE, _MOST_ALONE = 64, 256
_PIECE_STEPS = 1.0  # how long a piece may take while other runs are decoding, as a multiple of a decode step
_LEAST_WITH_LOGPROBS, _WITH_LOGPROBS = 4, 64  # least and most tokens of a piece with logits (V,) at every position


@dataclass(eq=False)
class Prompt:
    """A prompt to feed, for one run or for several runs of a client with the same prompt."""

    tokens: tuple[int, ...]
    client: str
    order: int  # number in the order of arrival
    base: State | None  # the state to which the prompt is fed; None: the empty state
    position: int = 0  # number of tokens fed to the prompt's state, including those of `base`
    fed: int = 0  # how many of `tokens` have been fed
    sequences: list[Sequence] = field(default_factory=list)
    slots: "Slots[Prompt] | None" = None  # slots with one row, which is the prompt's state; None: the state is in `resting`
    resting: Several[Tensor] | None = None  # state tensors on the host, without the batch axis; None: the state is empty or in `slots`
    before: NDArray[np.float32] | None = None  # logits (V,) after the last token fed, if log-probabilities are requested

    @property
    def left(self) -> int:
        return len(self.tokens) - self.fed

    @property
    def scored(self) -> Sequence | None:
        """Return the first run that requests log-probabilities of the prompt, or None. All runs that request them want the same number of
        alternatives, `n_top`.
        """
        return next((sequence for sequence in self.sequences if sequence.request.prompt_logprobs is not None), None)

    @property
    def n_top(self) -> int | None:
        return None if (scored := self.scored) is None else scored.request.prompt_logprobs

    @property
    def wanted(self) -> bool:
        """Return whether one of the prompt's runs has a slot."""
        return not all(sequence.aside for sequence in self.sequences)


@dataclass(frozen=True)
class Fed:
    """A prompt of which a piece was fed: its runs, the row with the state after the piece, the logits (V,) of the next token, and whether
    the prompt was fed to its end.
    """

    sequences: list[Sequence]
    states: Row
    logits: NDArray[np.float32]
    done: bool

    def copy(self) -> tuple[list[Tensor], Logits]:
        """Return copies of the state tensors, each without the batch axis, and of the logits."""
        return self.states.slots.state(self.states.at), self.logits.copy()


class Prefill:
    """The prompts that are being fed, and the unfinished prompts of preempted runs."""

    def __init__(self, session: StepSession[Any]) -> None:
        self._session = session
        self._most_piece = min(_MOST_PIECE, session.decoder.max_call_tokens or _MOST_PIECE)
        self._alone_on = _MOST_ALONE if session.provider == CPU else _MOST_PIECE
        self._prompts: list[Prompt] = []
        self._resting: list[Prompt] = []
        self._fed: dict[str, int] = {}  # client -> tokens fed, for each client with a prompt in prefill
        self._turn = 0
        self.price = Price()  # estimates the time of a call
        self._price_told = Price()  # estimates the time of a call that also computes the log-probabilities of its tokens

    def __len__(self) -> int:
        """Return the number of runs that have a slot."""
        return len(self.sequences) if self._prompts else 0

    @property
    def sequences(self) -> list[Sequence]:
        """Return the runs that have a slot."""
        return [sequence for prompt in self._prompts for sequence in prompt.sequences if not sequence.aside]

    @property
    def all_long(self) -> bool:
        """Return whether each prompt takes more than one piece, if no run is decoding."""
        return all(prompt.left > self._most_alone for prompt in self._prompts)

    @property
    def _most_alone(self) -> int:
        """Return the most tokens of a piece of a long prompt if no run is decoding."""
        return min(_SHORT_PIECE if len(self._fed) > 1 else self._alone_on, self._most_piece)

    def __contains__(self, sequence: Sequence) -> bool:
        return any(sequence in prompt.sequences for prompt in (*self._prompts, *self._resting))

    def add(self, sequence: Sequence) -> None:
        """Begin to feed the run's prompt, or continue to feed it to the run's state."""
        request, state, before = sequence.request, sequence.state, sequence.before
        sequence.state = sequence.before = None
        if (found := self._under_way(sequence)) is not None:
            if request.prompt_logprobs is not None and found.scored is not None:
                sequence.run.prompt_logprobs.extend(found.scored.run.prompt_logprobs)
            found.sequences.append(sequence)
            sequence.run.usage.cached_tokens += found.fed - sequence.fed
            sequence.position, sequence.fed = found.position, found.fed
            self._wake(found)
            return
        prompt = Prompt(
            tokens=sequence.tokens,
            client=request.client,
            order=sequence.order,
            base=sequence.base,
            position=sequence.position,
            fed=sequence.fed,
            sequences=[sequence],
        )
        if state is not None:
            prompt.resting, prompt.before = state.tensors, before
        self._resting.append(prompt)
        self._wake(prompt)

    def set_aside(self, sequence: Sequence) -> None:
        """Stop feeding the run's prompt unless another run with a slot needs it. The run is already marked as preempted."""
        self._rest(self._of(sequence))

    def back(self, sequence: Sequence) -> None:
        """Continue to feed the prompt of a run that has a slot again."""
        self._wake(self._of(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove the run, and its prompt if no other run needs it."""
        prompt = self._of(sequence)
        prompt.sequences.remove(sequence)
        if prompt.sequences:
            self._rest(prompt)
        else:
            (self._prompts if prompt in self._prompts else self._resting).remove(prompt)
            self._forget_fed()

    def _rest(self, prompt: Prompt) -> None:
        """If no run with a slot needs the prompt, move the prompt's state from the slots' memory to the host."""
        if prompt in self._prompts and not prompt.wanted:
            if prompt.slots is not None:
                prompt.resting, prompt.slots = prompt.slots.state(0), None
            self._prompts.remove(prompt)
            self._resting.append(prompt)
            self._forget_fed()

    def _wake(self, prompt: Prompt) -> None:
        if prompt in self._resting:
            self._resting.remove(prompt)
            self._prompts.append(prompt)
            # A client without other prompts in prefill begins with the smallest count of the other clients.
            self._fed.setdefault(prompt.client, min(self._fed.values(), default=0))

    def _forget_fed(self) -> None:
        here = {prompt.client for prompt in self._prompts}
        self._fed = {client: tokens for client, tokens in self._fed.items() if client in here}

    def budget(self, step_s: float | None) -> int:
        """Prefill budget in tokens, worth about one decode step. `step_s` is None when nothing is decoding."""
        if step_s is None or not self.price.token_s:
            return _MOST_PIECE
        tokens = (_PIECE_STEPS * step_s - self.price.call_s) / self.price.token_s
        return max(LEAST_PIECE, min(_MOST_PIECE, int(tokens)))

    def next(self, budget: int, *, alone: bool = False) -> tuple[list[Prompt], int]:
        """Choose the prompts for the next call of the model: one long prompt, of which a piece is fed, or short prompts that are fed to
        their ends. Returns the chosen prompts and the largest number of tokens to feed from each of them. `alone`: no run is decoding.
        """
        self._turn += 1
        by_age = self._turn % 2
        first = min(self._prompts, key=lambda prompt: (self._fed[prompt.client], prompt.order) if by_age else (prompt.left, 0))
        most = self._most_alone if alone else self._most_piece
        size = min(first.left, most, budget if first.n_top is None else self._told_size(budget))
        if not _short(first, size):
            return [first], size
        width = max(size, min(LEAST_PIECE, self._most_piece))
        others = (prompt for prompt in self._prompts if prompt is not first and _short(prompt, width))
        together = [first, *islice(others, max(budget // width - 1, 0))]
        return together, max(prompt.left for prompt in together)

    def _told_size(self, budget: int) -> int:
        """Return how many tokens of a prompt with log-probabilities take as long as `budget` tokens of a prompt without
        log-probabilities.
        """
        price = self._price_told
        if not price.token_s:
            return LEAST_PIECE
        return max(_LEAST_WITH_LOGPROBS, min(int((self.price.of(budget) - price.call_s) / price.token_s), _WITH_LOGPROBS, budget))

    def cost(self, prompts: list[Prompt], size: int) -> int:
        """Return the number of tokens by which a call with these prompts reduces the budget."""
        tokens = max(len(prompts) * size, LEAST_PIECE) + int(self.price.call_tokens)
        if prompts[0].n_top is None or not self.price.token_s:
            return tokens
        return max(tokens, int(self._price_told.of(size) / self.price.token_s))

    def feed(self, prompts: list[Prompt], size: int) -> list[Fed]:
        """Feed `size` tokens of each prompt, or fewer if it ends before. Prompts that are done are removed."""
        slots = self._slots_of(prompts)
        lengths: Ids = np.array([min(size, prompt.left) for prompt in prompts], np.int64)
        tokens: Ids = np.zeros((len(prompts), size), np.int64)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            tokens[row, :length] = prompt.tokens[prompt.fed : prompt.fed + length]
        slots.check(prompts, [prompt.position for prompt in prompts])
        slots.reserve(size)
        every = prompts[0].n_top is not None  # whether logits are needed at every position; such a prompt is fed alone
        wanted: Ids = np.arange(size, dtype=np.int64)[None] if every else lengths[:, None] - 1
        started = time.perf_counter()
        logits = self._session.run(tokens, lengths, slots.positions[: len(prompts)], wanted, *slots.sets)
        seconds = time.perf_counter() - started
        slots.stepped(lengths)
        if not every or not self.price.token_s:
            self.price.paid(tokens.size, seconds)
        if every:
            started = time.perf_counter()
            _tell(prompts[0], tokens[0].tolist(), logits[0])
            self._price_told.paid(tokens.size, seconds + time.perf_counter() - started)
        fed: list[Fed] = []
        for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
            prompt.position += length
            prompt.fed += length
            self._fed[prompt.client] += length
            for sequence in prompt.sequences:
                sequence.position, sequence.fed = prompt.position, prompt.fed
            if not prompt.left:
                self._prompts.remove(prompt)
            fed.append(Fed(prompt.sequences, Row(slots, row), logits[row, -1], done=not prompt.left))
        if any(each.done for each in fed):
            self._forget_fed()
        return fed

    def _under_way(self, sequence: Sequence) -> Prompt | None:
        """Return a prompt in prefill with the same tokens, client and base state, of which at least as much is fed, or None. Prompts are
        not shared between clients, because the speed would reveal that another client sent the same prompt.
        """
        asked = sequence.request
        for each in (*self._prompts, *self._resting):
            # `scores` is False if the run needs log-probabilities that this prompt does not compute.
            scores = asked.prompt_logprobs in (None, each.n_top)
            alike = each.client == asked.client and each.base is sequence.base and each.tokens == sequence.tokens
            if scores and alike and each.fed >= sequence.fed:
                return each
        return None

    def _of(self, sequence: Sequence) -> Prompt:
        return next(prompt for prompt in (*self._prompts, *self._resting) if sequence in prompt.sequences)

    def _slots_of(self, prompts: list[Prompt]) -> Slots[Prompt]:
        """Return the slots for a call. For a single prompt they are its own slots, which keep its state for the next piece; several prompts
        share slots for one call, because all of them end with it.
        """
        if len(prompts) == 1 and prompts[0].slots is not None:
            return prompts[0].slots
        slots: Slots[Prompt] = Slots(self._session, len(prompts))
        for prompt in prompts:
            slots.add(prompt, prompt.resting, prompt.position)
        if len(prompts) == 1:
            prompts[0].slots, prompts[0].resting = slots, None
        return slots


def sequences_of(prompts: Several[Prompt]) -> list[Sequence]:
    """Return the runs of these prompts."""
    return [sequence for prompt in prompts for sequence in prompt.sequences]


def _short(prompt: Prompt, size: int) -> bool:
    """Return whether the prompt has no slots of its own and can be fed in one piece of this size, without log-probabilities."""
    return prompt.slots is None and prompt.n_top is None and prompt.left <= size


def _tell(prompt: Prompt, piece: list[int], logits: Logits) -> None:
    """Add the log-probability of each token of the piece to the runs that request them. `logits` (N, V) are the logits after each of the N
    tokens.
    """
    rows, tokens = (logits[:-1], piece[1:]) if prompt.before is None else (np.concatenate([prompt.before[None], logits[:-1]]), piece)
    logprobs = PromptLogprobs([None] if prompt.before is None else [], logprobs_of(rows, tokens, prompt.n_top or 0))
    for sequence in prompt.sequences:
        if sequence.request.prompt_logprobs is not None:
            sequence.run.prompt_logprobs.extend(logprobs)
    prompt.before = logits[-1].copy()
