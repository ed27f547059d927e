"""Buffers that a thread reuses for all draws. With a new buffer for every draw, page faults would take as long as all computation."""

import math
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

DEPTH: Final = 64  # a row's weights are summed in groups of this size

_kept = threading.local()


def padded(width: int) -> int:
    """Return `width` rounded up to a multiple of DEPTH."""
    return DEPTH * -(-width // DEPTH)


def scratch(name: str, shape: tuple[int, ...]) -> Floats:
    """Return this thread's buffer of this name, with `shape`. The next call with the same name returns the same memory."""
    buffers: dict[str, Floats] = _kept.__dict__
    size = math.prod(shape)
    if name not in buffers or buffers[name].size < size:
        buffers[name] = np.empty(size, np.float32)
    return buffers[name][:size].reshape(shape)
