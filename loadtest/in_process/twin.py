"""The step loop of the softmax twin (`export/kv_cache/graph.py`): the same threads as ours, caches written in place, nothing copied."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort

from export import contract
from loadtest.in_process.steps import WARM_STEPS, Stretch, along, median_s


class Twin:
    """B sequences of up to `capacity` tokens, whose caches are full from the beginning: a step after any number of tokens can be timed.

    What the caches hold does not change what a step costs, but that they hold something does: zeros that were never written are all in one
    page of memory, which is always at hand.
    """

    def __init__(self, graph: Path, *, rows: int, capacity: int, threads: int) -> None:
        options = ort.SessionOptions()  # those of `OnnxStepSession`
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        vocab_size = self._session.get_outputs()[0].shape[2]
        self._positions = np.zeros(rows, np.int64)
        numbers = {
            contract.TOKENS: np.random.default_rng(0).integers(0, vocab_size, (rows, 1)),
            contract.POSITIONS: self._positions,
            contract.WANTED: np.zeros((rows, 1), np.int64),
        }
        for name, array in numbers.items():
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))  # shared memory
        self.cache_bytes = 0
        for node in self._session.get_inputs():
            if node.name.startswith("state_"):
                cache = np.full((rows, node.shape[1], capacity, node.shape[3]), 0.1, np.float32)  # (B, H, T, D_k)
                self.cache_bytes += cache.nbytes
                value = ort.OrtValue.ortvalue_from_numpy(cache)
                self._binding.bind_ortvalue_input(node.name, value)
                self._binding.bind_ortvalue_output(f"new_{node.name}", value)
        logits = ort.OrtValue.ortvalue_from_numpy(np.empty((rows, 1, vocab_size), np.float32))
        self._binding.bind_ortvalue_output(contract.STEP_LOGITS, logits)
        self.capacity = capacity

    def step(self, position: int) -> None:
        """One token for each row, which has had `position` tokens."""
        assert position < self.capacity
        self._positions[:] = position
        self._session.run_with_iobinding(self._binding)

    def step_s(self, position: int, seconds: float) -> float:
        """What that takes: the median of many, each at this position."""
        self.step(position)
        return median_s(lambda: self.step(position), seconds)

    def sequence(self, stretch: int) -> Iterator[Stretch]:
        """One sequence from its beginning until the cache is full, stretch by stretch."""
        for _ in range(WARM_STEPS):
            self.step(0)
        positions = iter(range(self.capacity))
        return along(lambda: self.step(next(positions)), self.capacity, stretch)
