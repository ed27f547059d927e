"""Draws tokens by a small graph in ONNX Runtime, `draw.onnx`, which `export/graphs/draw.py` writes.

Draws on several cores do not wait for the interpreter's lock there, as calls of numpy do (docs/decisions.md).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.scratch import Floats
from service.runtime.bound import bind
from service.runtime.onnx import open_graph

if TYPE_CHECKING:
    import onnxruntime as ort

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]

FILE = Path(__file__).with_name("draw.onnx")
# As inverse temperature and random number, these give the first of the likeliest tokens.
GREEDY, FIRST = np.finfo(np.float32).max, 1e-25
_BLOCK = 64  # the graph's `BLOCK`


class Draws(NamedTuple):
    """What the graph reads and writes for B rows, each (B, 1)."""

    inverse_temperatures: Floats
    uniforms: Doubles  # above 0 and below 1
    token_ids: Ids
    totals: Doubles  # NaN if the scores are not finite

    @classmethod
    def empty(cls, n_rows: int) -> "Draws":
        shape = n_rows, 1
        return cls(np.ones(shape, np.float32), np.full(shape, FIRST), np.zeros(shape, np.int64), np.zeros(shape))

    def of(self, rows: slice) -> "Draws":
        return Draws(self.inverse_temperatures[rows], self.uniforms[rows], self.token_ids[rows], self.totals[rows])

    def bound(self, scores: Floats) -> Callable[[], None]:
        """Return a function that draws a token from softmax(scores / temperature) in each row, each time from what the arrays have then.
        `scores` (B, V) and the arrays are C-contiguous.
        """
        inputs = _inputs(scores, self.inverse_temperatures, self.uniforms)
        return bind(session(), inputs, {"ids": self.token_ids, "total": self.totals})


def draw(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles) -> Ids:
    """Draw a token from softmax(scores / temperature) in each row. Shapes: (R, V), (R,), (R,) -> token ids (R,), -1 where the largest score
    is not finite.
    """
    token_ids, totals = session().run(None, _inputs(scores, inverse_temperatures[:, None], uniforms[:, None]))
    drawn: Ids = np.where(np.isnan(totals), -1, token_ids)[:, 0]
    return drawn


def _inputs(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles) -> dict[str, NDArray[Any]]:
    padding = np.array([0, 0, 0, -scores.shape[1] % _BLOCK])
    return {"scores": scores, "inverse_temperature": inverse_temperatures, "uniform": uniforms, "padding": padding}


@cache
def session() -> "ort.InferenceSession":
    """Return the session of all threads of this process. It has no weights, and every call runs on the caller's own thread."""
    return open_graph(FILE, threads=1)
