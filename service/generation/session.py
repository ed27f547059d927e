"""One call of a decoder's step graph: tokens and states in, logits and new states out, without a copy of either."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.generation.side_by_side import SideBySide
from service.runtime import one_runtime, open_graph, stays_on_the_cpu

if TYPE_CHECKING:
    import onnxruntime as ort

State = NDArray[Any]  # (B, ...) of one state tensor
Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

LEAST_ROWS = 4  # for each core; with fewer, to wake the cores takes longer than what they share (docs/log.md, 2026-11-21)


class StepSession(Protocol):
    """What the engine needs of a runtime. Calls come from one thread."""

    decoder: contract.Decoder
    vocab_size: int

    def bind(
        self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State], logits: Logits
    ) -> Callable[[], None]:
        """A call that feeds each row its first `lengths[b]` tokens: (B, N), (B,), (B,), (B, M), states (B, ...) -> logits (B, M, V).

        It reads and writes these arrays in place, as often as it is called: all are C-contiguous, and the new states go into `out`, which
        is other memory than `states`. `positions[b]` is how many tokens the row has had before.
        """
        ...

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State]) -> Logits:
        """The same, once."""
        ...


def zeros(decoder: contract.Decoder, rows: int) -> list[State]:
    """The states of `rows` sequences that have not begun."""
    return [np.zeros((rows, *state.shape), state.dtype) for state in decoder.states]


class OnnxStepSession:
    """A bundle's step graph in ONNX Runtime, with every input and output bound to memory of the caller's.

    It is opened twice over the same weights. A call of few rows is spread over `threads`. The rows of a larger one are shared out among
    them, so that the cores wait for each other once a step and not at every operator.
    """

    def __init__(self, bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto", share_out: bool = True) -> None:
        """On the CPU, whatever `provider` is. `share_out` False: every call is one of the runtime's, spread over `threads`."""
        one_runtime()
        stays_on_the_cpu(manifest.name, provider)
        assert manifest.decoder is not None
        self.decoder = manifest.decoder
        self.vocab_size = manifest.limits.vocab_size

        def opened(width: int) -> "ort.InferenceSession":
            return open_graph(bundle / manifest.graph.file, threads=width)

        self._wide = opened(threads)
        self._parts = threads if share_out else 1
        self._narrow = opened(1) if self._parts > 1 else self._wide
        self._side_by_side = SideBySide(self._parts)

    def bind(
        self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State], logits: Logits
    ) -> Callable[[], None]:
        B, P = len(tokens), self._parts
        if P == 1 or B < LEAST_ROWS * P:
            return self._bound(self._wide, tokens, lengths, positions, wanted, states, out, logits)

        def of_rows(part: slice) -> Callable[[], None]:
            own, own_out = [state[part] for state in states], [state[part] for state in out]
            return self._bound(self._narrow, tokens[part], lengths[part], positions[part], wanted[part], own, own_out, logits[part])

        ends = [B * part // P for part in range(P + 1)]
        return partial(self._side_by_side, [of_rows(slice(begin, end)) for begin, end in pairwise(ends)])

    def run(self, tokens: Ids, lengths: Ids, positions: Ids, wanted: Ids, states: Sequence[State], out: Sequence[State]) -> Logits:
        logits: Logits = np.empty((*wanted.shape, self.vocab_size), np.float32)
        self.bind(tokens, lengths, positions, wanted, states, out, logits)()
        return logits

    def _bound(
        self,
        session: "ort.InferenceSession",
        tokens: Ids,
        lengths: Ids,
        positions: Ids,
        wanted: Ids,
        states: Sequence[State],
        out: Sequence[State],
        logits: Logits,
    ) -> Callable[[], None]:
        """One call of the runtime."""
        binding = session.io_binding()
        inputs: dict[str, State] = {contract.TOKENS: tokens, contract.LENGTHS: lengths, contract.WANTED: wanted}
        if self.decoder.takes_positions:
            inputs[contract.POSITIONS] = positions
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        outputs: dict[str, State] = {contract.STEP_LOGITS: logits}
        for state, before, after in zip(self.decoder.states, states, out, strict=True):
            binding.bind_cpu_input(state.name, before)
            outputs[state.output] = after
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bound = (inputs, list(states), outputs)  # the binding itself keeps nothing alive

        def call(_: object = bound) -> None:
            session.run_with_iobinding(binding)

        return call
