"""Draws tokens by a small graph in ONNX Runtime, `draw.onnx`, which `export/graphs/draw.py` writes.

One call takes as long as two calls of numpy, and draws on several cores do not wait for the interpreter's lock (docs/log.md, 2026-11-26).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.scratch import Floats
from service.runtime.onnx import open_graph

if TYPE_CHECKING:
    import onnxruntime as ort

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]

FILE = Path(__file__).with_name("draw.onnx")
GREEDY = np.finfo(np.float32).max  # as inverse temperature, with 0 as random number, it gives the first of the likeliest tokens


@cache
def _session() -> "ort.InferenceSession":
    """Return the session of all threads of this process. It has no weights, and every call runs on the caller's own thread."""
    return open_graph(FILE, threads=1)


def draw(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles) -> Ids:
    """Draw a token from softmax(scores / temperature) in each row. Shapes: (R, V), (R, 1), (R, 1) -> token ids (R, 1), -1 where the largest
    score is not finite.
    """
    ids: Ids = _session().run(None, {"scores": scores, "inverse_temperature": inverse_temperatures, "uniform": uniforms})[0]
    return ids


def bound(scores: Floats, inverse_temperatures: Floats, uniforms: Doubles, ids: Ids) -> Callable[[], None]:
    """Return a function that draws as `draw` does, each time from what the arrays have then, into `ids` (R, 1). All arrays are
    C-contiguous.
    """
    session, arrays = _session(), {"scores": scores, "inverse_temperature": inverse_temperatures, "uniform": uniforms}
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("ids", "cpu", 0, np.int64, ids.shape, ids.ctypes.data)

    # The default argument keeps the arrays alive, because a binding holds no references to them.
    def call(_: object = (arrays, ids)) -> None:
        session.run_with_iobinding(binding)

    return call
