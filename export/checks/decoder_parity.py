"""Does the step graph say what torch says, and does it say the same however its work is cut?

Values first: torch against onnxruntime, two calls in a row, at sizes that break careless graphs. Then onnxruntime against itself, bit for
bit: a whole prompt, pieces of it and single steps; alone and in a batch; padded and not; on one thread and on two. No torch in here.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from export import contract
from export.checks.parity import Feed, Reference, Tensors, scale
from export.errors import ExportError

Values = NDArray[np.float32]
Ids = NDArray[np.int64]
States = dict[str, Values]

# The same sums in another order, over hundreds of tokens: 3e-6 .. 3e-5 measured, and random weights are the worst. Relative to the largest
# value of a tensor where that is above 1.
TOLERANCE = 1e-4

# Rows of several ages, lengths and a row of none, two calls each, the second with the states of the first: (B, N), (B, N of the second).
SIZES = (((1, 1), 1), ((2, 1), 3), ((1, 9), 1), ((3, 33), 17), ((5, 70), 1), ((2, 130), 65))
STARTS = (0, 1, 1_000, 70_001, 31)  # tokens before the first call, of each row: only positions can tell

PROMPTS = (150, 1, 64, 97, 131)  # lengths in tokens that are computed in every way; beyond the longest window in use
PIECES = (64, 7)


class Steps:
    """A step graph, or torch in its place, called with plain arrays."""

    def __init__(self, answer: Reference, inputs: Tensors, *, n_positions: int | None = None) -> None:
        """n_positions: how many tokens of a sequence it takes; None: any number."""
        self.answer = answer
        self.n_positions = n_positions
        self.takes_positions = any(tensor.name == contract.POSITIONS for tensor in inputs)
        self.states = [tensor for tensor in inputs if tensor.name.startswith("state_")]

    def begin(self, rows: int) -> States:
        """The states before the first token."""
        return {state.name: np.zeros((rows, *map(int, state.shape[1:])), state.dtype) for state in self.states}

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, states: States, wanted: Ids | None = None) -> tuple[Values, States]:
        """(B, N), (B,), (B,), wanted (B, M) or None for all -> logits (B, M or N, V), the new states."""
        B, N = tokens.shape
        feed: Feed = {contract.TOKENS: tokens, contract.LENGTHS: lengths}
        if self.takes_positions:
            feed[contract.POSITIONS] = positions
        feed[contract.WANTED] = np.tile(np.arange(N), (B, 1)) if wanted is None else wanted
        outputs = dict(self.answer(feed | states))  # type: ignore[arg-type]
        return outputs[contract.STEP_LOGITS], {name: outputs[f"new_{name}"] for name in states}


def compare(graph: Steps, reference: Steps, *, vocab_size: int, tolerance: float = TOLERANCE) -> float:
    """The largest |graph - reference| of logits and states. Raises ExportError for the first tensor beyond the tolerance."""
    random = np.random.default_rng(0)
    largest = 0.0
    for (B, N), N_after in sizes_within(graph.n_positions):
        got = want = graph.begin(B)
        positions = np.array([_start(b, N + N_after, graph) for b in range(B)])
        for n in (N, N_after):
            tokens, lengths = random.integers(0, vocab_size, (B, n)), _lengths(B, n)
            got_logits, got = graph.run(tokens, lengths, positions, got)
            want_logits, want = reference.run(tokens, lengths, positions, want)
            is_token = np.arange(n) < lengths[:, None]  # the logits of padding are nobody's business
            pairs = {contract.STEP_LOGITS: (got_logits[is_token], want_logits[is_token])} | {name: (got[name], want[name]) for name in want}
            for name, (a, b) in pairs.items():
                if a.shape != b.shape:
                    raise ExportError(f"{name}: at B={B}, N={n} the graph gives the shape {a.shape}, and the model {b.shape}")
                error, allowed = float(np.abs(a - b).max(initial=0.0)), tolerance * scale(b)
                if not error <= allowed:  # not `>`: NaN must fail
                    raise ExportError(f"{name}: at B={B}, N={n} the graph is {error:.3g} away from the model, and {allowed:.3g} is allowed")
                largest = max(largest, error)
            positions = positions + lengths
    return largest


def sizes_within(n_positions: int | None) -> tuple[tuple[tuple[int, int], int], ...]:
    """Those of SIZES whose two calls there are positions for."""
    return tuple(size for size in SIZES if n_positions is None or size[0][1] + size[1] <= n_positions)


def _start(row: int, N: int, steps: Steps) -> int:
    """Where a row begins that gets N tokens: where they still have positions."""
    return STARTS[row] if steps.n_positions is None else min(STARTS[row], steps.n_positions - N)


def _lengths(B: int, N: int) -> Ids:
    """From N down to 1; a batch of five has a row that gets nothing."""
    lengths = [max(1, N * (B - i) // B) for i in range(B)]
    if B == 5:
        lengths[2] = 0
    return np.array(lengths)


def inexact(open_steps: Callable[[int], Steps], *, vocab_size: int) -> str | None:
    """What changes the bits of a row, in words; None for a graph whose rows depend on nothing but themselves.

    `open_steps` gives the graph on so many threads. The sign of a zero is not looked at: no result can tell.
    """
    one, two = open_steps(1), open_steps(2)
    random = np.random.default_rng(1)
    lengths = [min(n, one.n_positions or n) for n in PROMPTS]
    rows = [Row(random.integers(0, vocab_size, n), _start(b, n, one)) for b, n in enumerate(lengths)]
    whole = [row.alone(one, [len(row.tokens)]) for row in rows]
    for what, got in _ways(rows, one, two):
        for row, a, b in zip(rows, got, whole, strict=True):
            if (name := _differing(a, b)) is not None:
                return f"{what} changes {name} of a prompt of {len(row.tokens)} tokens"
    return None


Result = tuple[Values, States]  # logits of every token (N, V), the state after the last one (1, ...)


class Row:
    """A prompt that begins at a position."""

    def __init__(self, tokens: Ids, start: int) -> None:
        self.tokens, self.start = tokens, start

    def alone(self, steps: Steps, pieces: Sequence[int], *, padding: int = 0) -> Result:
        """In pieces of these lengths, each with so many tokens of padding behind it."""
        states, logits, done = steps.begin(1), [], 0
        for n in pieces:
            tokens = np.pad(self.tokens[done : done + n], (0, padding), constant_values=1)[None]
            out, states = steps.run(tokens, np.array([n]), np.array([self.start + done]), states)
            logits.append(out[0, :n])
            done += n
        return np.concatenate(logits), states


def together(rows: list[Row], steps: Steps, piece: int) -> list[Result]:
    """All rows in one batch, a piece of each at a time; who is done gets padding only."""
    states = steps.begin(len(rows))
    logits: list[list[Values]] = [[] for _ in rows]
    for done in range(0, max(len(row.tokens) for row in rows), piece):
        lengths = np.array([min(piece, max(0, len(row.tokens) - done)) for row in rows])
        tokens = np.ones((len(rows), piece), np.int64)
        for b, row in enumerate(rows):
            tokens[b, : lengths[b]] = row.tokens[done : done + lengths[b]]
        positions = np.array([row.start + min(done, len(row.tokens)) for row in rows])
        out, states = steps.run(tokens, lengths, positions, states)
        for b, n in enumerate(lengths):
            logits[b].append(out[b, :n])
    return [(np.concatenate(parts), {k: v[b : b + 1] for k, v in states.items()}) for b, parts in enumerate(logits)]


def _ways(rows: list[Row], one: Steps, two: Steps) -> Iterator[tuple[str, list[Result]]]:
    """Everything that must give what a whole prompt alone on one thread gives."""
    for piece in PIECES:
        yield f"a prompt in pieces of {piece}", [row.alone(one, _pieces(len(row.tokens), piece)) for row in rows]
    yield "token by token", [row.alone(one, [1] * len(row.tokens)) for row in rows]
    yield "padding", [row.alone(one, [len(row.tokens)], padding=13) for row in rows]
    yield "padding of pieces", [row.alone(one, _pieces(len(row.tokens), 7), padding=2) for row in rows]
    yield "a batch", together(rows, one, max(PROMPTS))
    yield "a batch in pieces of 64", together(rows, one, 64)
    yield "a batch token by token", together(rows, one, 1)
    yield "a second thread", [row.alone(two, [len(row.tokens)]) for row in rows]
    yield "a batch on two threads", together(rows, two, max(PROMPTS))
    yield "a batch token by token on two threads", together(rows, two, 1)


def _pieces(n: int, piece: int) -> list[int]:
    return [min(piece, n - done) for done in range(0, n, piece)]


def _differing(a: Result, b: Result) -> str | None:
    """The first tensor that is not the same."""
    pairs = {contract.STEP_LOGITS: (a[0], b[0])} | {name: (a[1][name], b[1][name]) for name in b[1]}
    return next((name for name, (x, y) in pairs.items() if not np.array_equal(x, y)), None)
