"""Runs the step graph of a softmax twin (`export/kv_cache/graph.py`): our decoder with softmax attention and a KV cache, which a step
extends in place. It gets as many threads as our decoder.

A step of the twin takes longer at later positions, while a step of our decoder takes constant time. Both are measured along one long
sequence, to find the position from which our decoder is faster.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime as ort

from export import contract
from loadtest.in_process.steps import WARM_STEPS, Stretch, along, long_sequence, median_s

TWIN_TOKENS = 8_192
STRETCH, TWIN_STRETCH = 1_000, 256  # tokens in a measured stretch of our decoder, and in one of its twin


class Twin:
    """A twin with `rows` sequences of up to `capacity` tokens. Its KV caches are full from the start, so that a step at any position can be
    timed.

    The caches' values do not affect a step's time, but they must have been written: zeros that were never written all share one page of
    memory, which is always in the CPU's cache.
    """

    def __init__(self, graph: Path, *, rows: int, capacity: int, threads: int) -> None:
        options = ort.SessionOptions()  # the same options as in `OnnxStepSession`
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
            # The tensor uses the array's memory, without a copy.
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
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
        """Feed the token at `position` to each sequence."""
        assert position < self.capacity
        self._positions[:] = position
        self._session.run_with_iobinding(self._binding)

    def step_s(self, position: int, seconds: float) -> float:
        """Return the median seconds of a step at `position`."""
        self.step(position)
        return median_s(lambda: self.step(position), seconds)

    def sequence(self, stretch: int) -> Iterator[Stretch]:
        """Feed one sequence from position 0 to the cache's capacity, and yield the measurements after every `stretch` tokens."""
        for _ in range(WARM_STEPS):
            self.step(0)
        positions = iter(range(self.capacity))
        return along(lambda: self.step(next(positions)), self.capacity, stretch)


def long_sequences(bundle: Path, tokens: int, threads: int, twin: Path | None) -> Iterator[tuple[Stretch, list[Stretch]]]:
    """Feed a sequence of `tokens` tokens to the bundle's decoder. After each stretch, yield it with the stretches of the twin that were
    measured next; there are none after TWIN_TOKENS, or if `twin`, the path of its graph, is None. Decoder and twin take turns, so that a
    slow minute of the machine slows both."""
    # The twin's memory is kept until the end, so that only the sequence of the bundle's decoder changes the memory of this process.
    softmax = Twin(twin, rows=1, capacity=min(tokens, TWIN_TOKENS), threads=threads) if twin else None
    growing = softmax.sequence(TWIN_STRETCH) if softmax else iter(())
    for stretch in long_sequence(bundle, tokens, threads, STRETCH):
        yield stretch, list(islice(growing, STRETCH // TWIN_STRETCH + 1))


@dataclass(frozen=True)
class Line:
    """The straight line s(t) = at_0_s + s_per_position t: the seconds of a step at position t."""

    at_0_s: float
    s_per_position: float

    def at(self, position: float) -> float:
        return self.at_0_s + self.s_per_position * position


def fitted(stretches: Sequence[Stretch]) -> Line:
    """Fit a line by least squares through the midpoints of at least two stretches."""
    slope, at_0 = np.polyfit([stretch.middle for stretch in stretches], [stretch.s_per_token for stretch in stretches], 1)
    return Line(float(at_0), float(slope))


def crossover(flat: Sequence[Stretch], growing: Sequence[Stretch]) -> float | None:
    """Return the position from which every token of `growing` (the twin) takes longer than the median token of `flat` (our decoder), or
    None if there is none.

    If `growing` is still faster at the end of its measurement, the position is where the line fitted to `growing` reaches that median.
    """
    price_s = statistics.median(stretch.s_per_token for stretch in flat)
    cheaper = [stretch for stretch in growing if stretch.s_per_token <= price_s]
    if not cheaper:
        return 0
    last = cheaper[-1]
    if last is not growing[-1]:
        return last.first + last.tokens
    line = fitted(growing)
    if line.s_per_position <= 0:
        return None
    return max(last.first + last.tokens, (price_s - line.at_0_s) / line.s_per_position)
