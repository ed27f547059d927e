"""Runs the ONNX graph that `graph.py` writes, with caches that are allocated once and written in place. This file does not import torch."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export import contract
from export.checks.parity import open_graph


class CachedSession:
    """A batch of `rows` sequences of the same length, up to `capacity` tokens. `size_bytes` is the memory of their caches."""

    def __init__(self, graph: Path, *, rows: int, capacity: int, threads: int) -> None:
        self.session = open_graph(graph, threads=threads)
        self.capacity = capacity
        caches = [node for node in self.session.get_inputs() if node.name.startswith("state_")]
        zeros = {node.name: np.zeros((rows, node.shape[1], capacity, node.shape[3]), np.float32) for node in caches}
        self.size_bytes = sum(cache.nbytes for cache in zeros.values())
        self.position = 0  # number of tokens that the caches contain
        self._rows = rows
        self._logits = np.empty((rows, 1, self.session.get_outputs()[0].shape[2]), np.float32)
        self._binding = self.session.io_binding()
        for name, cache in zeros.items():
            value = ort.OrtValue.ortvalue_from_numpy(cache)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(f"new_{name}", value)  # input and output share memory, so nothing is copied
        self._binding.bind_output(contract.STEP_LOGITS, "cpu", 0, np.float32, self._logits.shape, self._logits.ctypes.data)

    def run(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run the next N tokens of every row (B, N) and return the logits (B, V) after the last token. The next call overwrites this array.

        More than one token per call is allowed only in the first call, or with one row. Raises ValueError beyond the capacity.
        """
        N = tokens.shape[1]
        if self.position + N > self.capacity:
            raise ValueError(f"{self.position} + {N} tokens do not fit into a cache of {self.capacity}")
        self._binding.bind_cpu_input(contract.TOKENS, np.ascontiguousarray(tokens))
        self._binding.bind_cpu_input(contract.POSITIONS, np.full(self._rows, self.position))
        self._binding.bind_cpu_input(contract.WANTED, np.full((self._rows, 1), N - 1))
        self.session.run_with_iobinding(self._binding)
        self.position += N
        return self._logits[:, 0]
