"""Runs a decoder's step graph, which computes logits and new states from tokens and states. No state is copied.

The engine uses only the protocols `StepSession` and `States`. Their implementation for CPUs is in this file, and the one for GPUs in
`gpu/`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime.bound import bind
from service.runtime.onnx import CPU, one_runtime, open_graph
from service.runtime.side_by_side import SideBySide

if TYPE_CHECKING:
    import onnxruntime as ort

Tensor = NDArray[Any]  # one state tensor, on the host
Ids = NDArray[np.int64]
Logits = NDArray[np.float32]
# Makes, for a slice of rows, the function to call after each computation of their logits, on the same thread.
Then = Callable[[slice], Callable[[], None]]


class Step(NamedTuple):
    """A step feeds to each row b its first `lengths[b]` tokens and computes logits (B, M, V). All arrays are C-contiguous.

    `wanted` has the indices of the tokens after which logits are computed; it must not change. `positions[b]` is the number of tokens that
    were fed to row b before. The new states are written to `out`, which shares memory with `states` only by `States.share`. Both may have
    more rows, and have room for the tokens.
    """

    tokens: Ids  # (B, N)
    lengths: Ids  # (B,)
    positions: Ids  # (B,)
    wanted: Ids  # (B, M)
    states: Any  # B rows
    out: Any  # B rows
    logits: Logits  # (B, M, V)
    then: Then | None = None


SHRINKS = 2  # slots are given back when half of them would do: each step reads all of them
MUCH_TO_FOLLOW = 2**17  # number of logits above which what follows a step on all cores is divided among them too
SMALL_BYTES = 32 * 2**20  # most bytes of a model whose weights stay in a core's caches
LEAST_ROWS_OF_LARGE = 8  # least rows per core of a larger model, whose weights each core would read
LEAST_ROWS = 4  # least rows per core; with fewer rows, waking more cores takes longer than they save (docs/decisions.md)


class States(Protocol):
    """The states of several sequences, one row for each, in the memory in which the session computes."""

    def put(self, row: int, states: Sequence[Tensor] | None) -> None:
        """Copy state tensors, each without the batch axis B, into a row; None: reset the row to the initial state."""
        ...

    def copy(self, row: int, source: Self, of: int, position: int) -> None:
        """Copy a row (number `of`) of `source`, which is at `position`, into `row`. `source` may be `self` or other states of the same
        session.
        """
        ...

    def read(self, row: int, position: int) -> list[Tensor]:
        """Return a copy of a row's state tensors at `position`, each without the batch axis B."""
        ...

    def reserve(self, position: int, rows: int) -> bool:
        """Make room for sequences of up to `position` tokens, the longest of the first `rows` rows, which are kept. If half of the room
        would do, give memory back. Returns whether the memory has moved."""
        ...

    def share(self, other: Self) -> None:
        """Use the memory of `other` for the tensors that a step updates in place."""
        ...


S = TypeVar("S", bound=States)


class StepSession(Protocol[S]):
    """The interface that the engine needs of a runtime. Call it from one thread only."""

    decoder: contract.Decoder
    vocab_size: int
    fingerprint: str  # the bundle's fingerprint
    provider: str  # ONNX Runtime's execution provider

    def states(self, rows: int) -> S:
        """Allocate states for this number of rows."""
        ...

    def batch(self, rows: int) -> int:
        """Return the batch size to use for `rows` sequences. It may be larger than `rows`, so that fewer different shapes occur."""
        ...

    def bind(self, *steps: Step) -> Callable[[], None]:
        """Return a function that makes steps of B rows each, one after the other. The rows may be computed in several parts, which do not
        wait for each other between steps.

        Each call reads `tokens` and `positions` and writes `logits` in place; `lengths` may change between calls only if the provider is
        the CPU.
        """
        ...

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: S, out: S) -> Logits:
        """Make one step, and return its logits."""
        ...


def beginning(decoder: contract.Decoder) -> list[Tensor]:
    """Return the state tensors of an empty sequence, each without the batch dimension B."""
    return [np.zeros(state.shape_at(0), state.dtype) for state in decoder.states]


class HostStates:
    """States in host memory: an array (B, ...) for each state tensor.

    Tensors with slots have the fewest of `Decoder.slot_counts` that the longest sequence needs. What a row has in slots that its own
    sequence does not use is arbitrary, but finite.
    """

    def __init__(self, decoder: contract.Decoder, rows: int) -> None:
        self._specs, self._counts = decoder.states, decoder.slot_counts or (0,)
        self.n_slots = self._counts[0]
        self.arrays = [self._new(rows, spec) for spec in decoder.states]

    def _new(self, rows: int, spec: contract.StateTensor) -> Tensor:
        """Return an array of zeros for a tensor."""
        shape = (spec.shape[0], min(self.n_slots, spec.shape[1]), spec.shape[2]) if spec.slots else spec.shape
        return np.zeros((rows, *shape), spec.dtype)

    def put(self, row: int, states: Sequence[Tensor] | None) -> None:
        for at, (array, spec) in enumerate(zip(self.arrays, self._specs, strict=True)):
            if not spec.slots:
                array[row] = 0 if states is None else states[at]
            elif states is not None:
                array[row, :, : states[at].shape[1]] = states[at]

    def copy(self, row: int, source: "HostStates", of: int, position: int) -> None:
        for array, other, spec in zip(self.arrays, source.arrays, self._specs, strict=True):
            if not spec.slots:
                array[row] = other[of]
            elif array is not other or row != of:
                used = spec.shape_at(position)[1]
                array[row, :, :used] = other[of, :, :used]

    def read(self, row: int, position: int) -> list[Tensor]:
        pairs = zip(self.arrays, self._specs, strict=True)
        return [(array[row, :, : spec.shape_at(position)[1]] if spec.slots else array[row]).copy() for array, spec in pairs]

    def reserve(self, position: int, rows: int) -> bool:
        needed = next((count for count in self._counts if count > position), self._counts[-1])  # the first slot has no token
        if needed <= self.n_slots < SHRINKS * max(needed, 1):
            return False
        kept, self.n_slots = min(needed, self.n_slots), needed
        for at, spec in enumerate(self._specs):
            before = self.arrays[at]
            if spec.slots and before.shape[2] != min(needed, spec.shape[1]):
                self.arrays[at] = self._new(len(before), spec)
                self.arrays[at][:rows, :, :kept] = before[:rows, :, :kept]
        return True

    def share(self, other: "HostStates") -> None:
        self.n_slots = other.n_slots
        for at, spec in enumerate(self._specs):
            if spec.slots:
                self.arrays[at] = other.arrays[at]


class OnnxStepSession:
    """A bundle's step graph in ONNX Runtime on the CPU. Inputs and outputs are bound to the caller's memory.

    The graph is opened twice, with shared weights. Many rows are divided among single-threaded calls, so that the cores synchronise once
    per step and not at every operator. But then each core reads all weights, so it takes more rows of a large model to save time. A call of
    few tokens of a small model is made on one thread, because its threads would wait for each other longer than they compute.
    """

    provider = CPU

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, threads: int, share_out: bool = True) -> None:
        """If `share_out` is False, rows are never divided, so every call is one call of the runtime on `threads` threads."""
        one_runtime()
        assert manifest.decoder is not None
        self.decoder = manifest.decoder
        self.vocab_size = manifest.limits.vocab_size
        self.fingerprint = manifest.fingerprint

        def opened(width: int) -> "ort.InferenceSession":
            return open_graph(bundle / manifest.graph.file, threads=width, promised=manifest.graph)

        self._wide = opened(threads)
        self._parts = threads if share_out else 1
        self._narrow = opened(1) if self._parts > 1 else self._wide
        self._side_by_side = SideBySide(self._parts)
        weights = sum(file.stat().st_size for file in bundle.glob(f"{manifest.graph.file}*"))  # a large graph has them in a second file
        self._small = weights <= SMALL_BYTES

    def states(self, rows: int) -> HostStates:
        return HostStates(self.decoder, rows)

    def batch(self, rows: int) -> int:
        return rows

    def bind(self, *steps: Step) -> Callable[[], None]:
        rows, width = steps[0].tokens.shape

        ends = [rows * number // self._parts for number in range(self._parts + 1)]

        def part(session: "ort.InferenceSession", begin: int = 0, end: int = rows) -> Callable[[], None]:
            calls: list[Callable[[], None]] = []
            for step in steps:
                calls.append(self._call(session, step, slice(begin, end)))
                if step.then is None:
                    continue
                if session is self._wide and self._parts > 1 and rows * self.vocab_size > MUCH_TO_FOLLOW:
                    calls.append(partial(self._side_by_side, [step.then(slice(*each)) for each in pairwise(ends) if each[0] < each[1]]))
                else:
                    calls.append(step.then(slice(begin, end)))
            return calls[0] if len(calls) == 1 else partial(_all, calls)

        if self._parts > 1 and rows >= self._parts * (LEAST_ROWS if self._small else LEAST_ROWS_OF_LARGE):
            return partial(self._side_by_side, [part(self._narrow, begin, end) for begin, end in pairwise(ends)])
        return part(self._narrow if self._small and rows * width < LEAST_ROWS else self._wide)

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: HostStates, out: HostStates) -> Logits:
        logits: Logits = np.empty((*wanted.shape, self.vocab_size), np.float32)
        self.bind(Step(tokens, lengths, positions, wanted, states, out, logits))()
        return logits

    def _call(self, session: "ort.InferenceSession", step: Step, rows: slice) -> Callable[[], None]:
        """Bind the arrays of some rows, and return a function that makes one call of the runtime."""
        inputs: dict[str, Tensor] = {
            contract.TOKENS: step.tokens[rows],
            contract.LENGTHS: step.lengths[rows],
            contract.WANTED: step.wanted[rows],
        }
        if self.decoder.takes_positions:
            inputs[contract.POSITIONS] = step.positions[rows]
        outputs: dict[str, Tensor] = {contract.STEP_LOGITS: step.logits[rows]}
        for state, before, after in zip(self.decoder.states, step.states.arrays, step.out.arrays, strict=True):
            inputs[state.name] = before[rows]
            outputs[state.output] = after[rows]
        return bind(session, inputs, outputs)


def _all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
