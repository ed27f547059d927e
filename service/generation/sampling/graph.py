"""Draws tokens by a small graph in ONNX Runtime, `draw.onnx`, which `export/graphs/draw.py` writes.

One call takes less time than the calls of numpy that it replaces, and draws on several cores do not wait for the interpreter's lock
(docs/log.md, 2026-11-26).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.scratch import Floats
from service.runtime.onnx import open_graph

if TYPE_CHECKING:
    import onnxruntime as ort

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]

FILE = Path(__file__).with_name("draw.onnx")
# As inverse temperature and random number, these give the first of the likeliest tokens.
GREEDY, FIRST = np.float32(1e30), 1e-30


class Draws(NamedTuple):
    """What the graph reads and writes for B rows, each (B, 1)."""

    inverse_temperatures: Floats
    uniforms: Doubles  # above 0 and below 1
    token_ids: Ids
    totals: Doubles  # NaN if no token could be drawn

    @classmethod
    def empty(cls, n_rows: int) -> "Draws":
        shape = n_rows, 1
        return cls(np.ones(shape, np.float32), np.full(shape, FIRST), np.zeros(shape, np.int64), np.zeros(shape))

    def of(self, rows: slice) -> "Draws":
        return Draws(self.inverse_temperatures[rows], self.uniforms[rows], self.token_ids[rows], self.totals[rows])

    def bound(self, scores: Floats) -> Callable[[], None]:
        """Return a function that draws a token from softmax(scores / temperature) in each row, each time from what the arrays have then.

        `scores` (B, V) and the arrays are C-contiguous. If a row's scores times its inverse temperature exceed float32, it gets no token.
        """
        opened, width = session(), width_of(scores.shape[1])
        binding = opened.io_binding()
        inputs = {"scores": scores, "inverse_temperature": self.inverse_temperatures, "uniform": self.uniforms}
        inputs |= {"width": np.array([width]), "shape": np.array([0, -1, width])}
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, array in {"ids": self.token_ids, "total": self.totals}.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

        # The default argument keeps the arrays alive, because a binding holds no references to them.
        def call(_: object = (inputs, self)) -> None:
            opened.run_with_iobinding(binding)

        return call


def draw(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles) -> Ids:
    """Draw a token from softmax(scores / temperature) in each row. Shapes: (R, V), (R,), (R,) -> token ids (R,), -1 where the largest score
    is not finite.
    """
    token_ids = _drawn(scores, inverse_temperatures, uniforms)
    if (lost := np.flatnonzero(token_ids < 0)).size:
        with np.errstate(over="ignore", invalid="ignore"):
            distances = scores[lost] - scores[lost].max(axis=1, keepdims=True)  # at most 0, so no product exceeds float32
        token_ids[lost] = _drawn(distances, inverse_temperatures[lost], uniforms[lost])
    return token_ids


def _drawn(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles) -> Ids:
    """Draw as `draw` does, but -1 also where a score times the inverse temperature exceeds float32."""
    draws = Draws.empty(len(scores))
    draws.inverse_temperatures[:, 0], draws.uniforms[:, 0] = inverse_temperatures, uniforms
    draws.bound(np.ascontiguousarray(scores))()
    token_ids: Ids = np.where(np.isnan(draws.totals), -1, draws.token_ids)[:, 0]
    return token_ids


@cache
def session() -> "ort.InferenceSession":
    """Return the session of all threads of this process. It has no weights, and every call runs on the caller's own thread."""
    return open_graph(FILE, threads=1)


@cache
def width_of(vocab_size: int) -> int:
    """Return the divisor of the vocabulary's size that is nearest to its square root, the number of tokens in a block."""
    return min((d for d in range(1, vocab_size + 1) if vocab_size % d == 0), key=lambda d: d + vocab_size // d)
