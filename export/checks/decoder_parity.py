"""Compares a decoder's step graph with torch over two consecutive calls, at sizes where incorrect graphs fail. Then onnxruntime's results
must have the same bits for a whole prompt, pieces of it and single steps, in any batch, with padding, on one thread and on two.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export import contract
from export.checks.parity import Feed, Reference, Tensors, largest_error, same_shape

Values = NDArray[np.float32]
Ids = NDArray[np.int64]
States = dict[str, Values]

# largest allowed relative error; see `parity.scale`. Measured were 3e-6 to 3e-5, as onnxruntime and torch sum tokens in different orders.
TOLERANCE = 1e-4

# Sizes of two consecutive calls: (B, N) of the first, N of the second. Rows have different starts and lengths. If B = 5, one has no tokens.
SIZES = (((1, 1), 1), ((2, 1), 3), ((1, 9), 1), ((3, 33), 17), ((5, 70), 1), ((2, 130), 65))
STARTS = (0, 1, 1_000, 70_001, 31)  # tokens before the first call, for each row; the graph receives them as `positions`
LIVED = 50  # a state with S slots is compared after S + 50 tokens, when slots have been overwritten

PROMPTS = (150, 1, 64, 97, 131)  # prompt lengths in tokens; 150 is longer than the largest attention window of any exported model
WHOLE = max(PROMPTS)
PIECES = (64, 7)


class Steps:
    """A decoder's step graph, or its torch model. Both are called with numpy arrays."""

    def __init__(self, answer: Reference, inputs: Tensors, *, n_positions: int | None = None, n_slots: int | None = None) -> None:
        """`n_positions` is the longest sequence in tokens; None means no limit. `n_slots` is the largest number of slots of
        states that have them."""
        self.answer = answer
        self.n_positions = n_positions
        self.n_slots = n_slots
        self.takes_positions = any(tensor.name == contract.POSITIONS for tensor in inputs)
        self.states = [tensor for tensor in inputs if tensor.name.startswith("state_")]

    def begin(self, rows: int, tokens: int | None = None) -> States:
        """Return the states before the first token, for `rows` sequences, with the slots of `tokens` tokens; None: with all slots."""
        most = self.n_slots or 0
        count = next((n for n in contract.slot_counts(most) if tokens is not None and n > tokens), most)
        shapes = {state.name: [self._size(axis, count) for axis in state.shape[1:]] for state in self.states}
        return {state.name: np.zeros((rows, *shapes[state.name]), state.dtype) for state in self.states}

    def _size(self, axis: str | int, count: int) -> int:
        return min(int(axis.removeprefix(contract.SLOTS) or count), count) if isinstance(axis, str) else axis

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, states: States, wanted: Ids | None = None) -> tuple[Values, States]:
        """Run tokens (B, N), lengths (B,), positions (B,), states, wanted (B, M) -> logits (B, M, V), new states. `wanted` None: all N."""
        B, N = tokens.shape
        feed: Feed = {contract.TOKENS: tokens, contract.LENGTHS: lengths}
        if self.takes_positions:
            feed[contract.POSITIONS] = positions
        feed[contract.WANTED] = np.tile(np.arange(N), (B, 1)) if wanted is None else wanted
        outputs = dict(self.answer(feed | states))  # type: ignore[arg-type]
        return outputs[contract.STEP_LOGITS], {name: outputs[f"new_{name}"] for name in states}


def compare(graph: Steps, reference: Steps, *, vocab_size: int, tolerance: float = TOLERANCE) -> float:
    """Return the largest |graph - reference| of logits and states. Raises ExportError for the first tensor above the tolerance."""
    random = np.random.default_rng(0)
    largest = 0.0
    lived_for = 0 if graph.n_slots is None else graph.n_slots + LIVED
    _, lived = feed(reference, random.integers(0, vocab_size, (1, lived_for)), WHOLE, reference.begin(1), with_logits=False)
    for (B, N), N_after in sizes_within(graph.n_positions):
        positions = np.array([_start(b, N + N_after, graph) for b in range(B)])
        got = want = graph.begin(B)
        if lived_for:
            # Slots without tokens before the position are no state: their keys of zeros would give weights that no text does.
            positions = np.where(positions > 0, lived_for, 0)
            for name, state in got.items():
                state[positions > 0] = lived[name]
        for n in (N, N_after):
            tokens, lengths = random.integers(0, vocab_size, (B, n)), _lengths(B, n)
            got_logits, got = graph.run(tokens, lengths, positions, got)
            want_logits, want = reference.run(tokens, lengths, positions, want)
            is_token = np.arange(n) < lengths[:, None]  # logits of padding are never read
            pairs = {contract.STEP_LOGITS: (got_logits[is_token], want_logits[is_token])} | {name: (got[name], want[name]) for name in want}
            for name, (a, b) in pairs.items():
                same_shape(a, b, f"{name}: at B={B}, N={n} the graph")
                largest = max(largest, largest_error(a, b, tolerance, f"{name}: at B={B}, N={n} the graph is"))
            positions = positions + lengths
    return largest


def feed(
    steps: Steps,
    texts: Sequence[Sequence[int] | Ids] | Ids,
    piece: int,
    states: States,
    *,
    starts: Sequence[int] | None = None,
    padding: int = 0,
    with_logits: bool = True,
) -> tuple[list[Values], States]:
    """Feed texts in one batch, `piece` tokens of each per call, and return the logits of each text's tokens (n, V) and the states after
    them. `starts` are the positions of the first tokens, 0 by default. Each call has `padding` columns beyond its longest piece. Without
    `with_logits`, only the first token of each piece has logits.
    """
    lengths, first = np.array([len(text) for text in texts]), np.zeros(len(texts), np.int64) if starts is None else np.array(starts)
    wanted = None if with_logits else np.zeros((len(texts), 1), np.int64)
    logits: list[list[Values]] = [[] for _ in texts]
    for done in range(0, lengths.max(), piece):
        here = np.clip(lengths - done, 0, piece)
        tokens = np.ones((len(texts), here.max() + padding), np.int64)
        for row, text, n in zip(tokens, texts, here, strict=True):
            row[:n] = text[done : done + n]
        found, states = steps.run(tokens, here, first + np.minimum(done, lengths), states, wanted)
        for parts, row, n in zip(logits, found, here, strict=True):
            parts.append(row[:n])
    return [np.concatenate(parts) if parts else np.empty((0, 0), np.float32) for parts in logits], states


def sizes_within(n_positions: int | None) -> tuple[tuple[tuple[int, int], int], ...]:
    """Return those SIZES whose two calls together need at most `n_positions` tokens."""
    return tuple(size for size in SIZES if n_positions is None or size[0][1] + size[1] <= n_positions)


def _start(row: int, N: int, steps: Steps) -> int:
    """Return the first position of a row that gets N tokens."""
    return STARTS[row] if steps.n_positions is None else min(STARTS[row], steps.n_positions - N)


def _lengths(B: int, N: int) -> Ids:
    """Return B decreasing lengths that begin with N. In a batch of five, one row has no tokens."""
    lengths = [max(1, N * (B - i) // B) for i in range(B)]
    if B == 5:
        lengths[2] = 0
    return np.array(lengths)


def inexact(open_steps: Callable[[int], Steps], *, vocab_size: int, slot_counts: Sequence[int] = ()) -> str | None:
    """Return the name of the first condition (such as padding) that changes a bit of a row's results; None if none does.
    `open_steps(threads)` opens the graph. `slot_counts`: the numbers of slots that a call can have. 0 and -0 count as equal.
    """
    one, two = open_steps(1), open_steps(2)
    random = np.random.default_rng(1)
    lengths = [min(n, one.n_positions or n) for n in PROMPTS]
    rows = [PromptRow(random.integers(0, vocab_size, n), _start(b, n, one)) for b, n in enumerate(lengths)]
    whole = _alone(rows, one, WHOLE)
    found = (_changed(what, rows, got, whole) for what, got in _ways(rows, one, two))
    if (name := next((each for each in found if each is not None), None)) is not None or not slot_counts:
        return name
    return changed_by_slots(one, random.integers(0, vocab_size, (1, slot_counts[-1])), slot_counts[:-1])


def changed_by_slots(steps: Steps, tokens: Ids, counts: Sequence[int]) -> str | None:
    """Return what changes if a state that fills `counts` slots has only those, or None."""
    states, done = steps.begin(1), 0
    with_slots = {state.name for state in steps.states if contract.has_slots(state)}
    for count in counts:
        last = count - 2  # the position of the last token that has a slot, as the first slot has none
        _, states = feed(steps, tokens[:, done:last], WHOLE, states, starts=[done], with_logits=False)
        few = {name: state[:, :, :count] if name in with_slots else state for name, state in states.items()}
        (got, got_states), (want, states) = (
            steps.run(tokens[:, last : last + 1], np.array([1]), np.array([last]), each) for each in (few, states)
        )
        if (name := _differing((got[0], got_states), (want[0], states))) is not None:
            return f"having {count} slots changes {name} at token {last}"
        done = last + 1
    return None


Result = tuple[Values, States]  # logits of every token (N, V), the state after the last one (1, ...)


@dataclass(frozen=True)
class PromptRow:
    """A prompt and the number of tokens before it."""

    tokens: Ids
    start: int


def run(rows: Sequence[PromptRow], steps: Steps, piece: int, *, padding: int = 0) -> list[Result]:
    """Run all rows in one batch, `piece` tokens of each per call. Each call has `padding` columns beyond its longest piece."""
    starts = [row.start for row in rows]
    logits, states = feed(steps, [row.tokens for row in rows], piece, steps.begin(len(rows)), starts=starts, padding=padding)
    return [(each, {k: v[b : b + 1] for k, v in states.items()}) for b, each in enumerate(logits)]


def _alone(rows: Sequence[PromptRow], steps: Steps, piece: int, *, padding: int = 0) -> list[Result]:
    return [run([row], steps, piece, padding=padding)[0] for row in rows]


def _ways(rows: list[PromptRow], one: Steps, two: Steps) -> Iterator[tuple[str, list[Result]]]:
    """Yield the name of every condition, and the results under it, which must have the bits of whole prompts alone on one thread."""
    for piece in PIECES:
        yield f"a prompt in pieces of {piece}", _alone(rows, one, piece)
    yield "token by token", _alone(rows, one, 1)
    yield "padding", _alone(rows, one, WHOLE, padding=13)
    yield "padding of pieces", _alone(rows, one, 7, padding=2)
    yield "a batch", run(rows, one, WHOLE)
    yield "a batch in pieces of 64", run(rows, one, 64)
    yield "a batch token by token", run(rows, one, 1)
    yield "a second thread", _alone(rows, two, WHOLE)
    yield "a batch on two threads", run(rows, two, WHOLE)
    yield "a batch token by token on two threads", run(rows, two, 1)


def _differing(a: Result, b: Result) -> str | None:
    """Return the name of the first tensor that differs, or None."""
    pairs = {contract.STEP_LOGITS: (a[0], b[0])} | {name: (a[1][name], b[1][name]) for name in b[1]}
    return next((name for name, (x, y) in pairs.items() if not np.array_equal(x, y[:, :, : x.shape[2]] if x.ndim == 4 else y)), None)


def _changed(what: str, rows: Sequence[PromptRow], got: Sequence[Result], whole: Sequence[Result]) -> str | None:
    """Return what the condition `what` changes, or None."""
    for row, a, b in zip(rows, got, whole, strict=True):
        if (name := _differing(a, b)) is not None:
            return f"{what} changes {name} of a prompt of {len(row.tokens)} tokens"
    return None
