"""Decodes on a GPU by the bundle's graph for GPUs, which draws the next tokens. A step copies one block of numbers to the GPU, and the
tokens back.

Two sets of states are used in turn. Steps have 1, 2, 4, 8, .. rows, so CUDA records one graph for each number of rows and each set. The
code works with the device of any ONNX Runtime provider, so tests run it on a CPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.generation.gpu.row_copies import RowCopies
from service.generation.gpu.session import DeviceStates
from service.generation.sampling.random import uniform
from service.runtime.bound import BoundGraph, Field, Placed
from service.runtime.onnx import CUDA, DEVICES, open_graph

Ids = NDArray[np.int64]

ROW = np.dtype([("seed", np.uint64), ("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float32)])


class SamplingSession:
    """A decoder's graph for GPUs, with the states of `slots` rows. The rows in use are the first ones. Call it from one thread only."""

    def __init__(
        self,
        graph: Path,
        gpu: contract.GpuGraph,
        decoder: contract.Decoder,
        *,
        slots: int,
        provider: str = CUDA,
        gpu_memory_gib: float | None = None,
    ) -> None:
        """Raises SettingsConflict if the GPU cannot be used, or not for every operator."""
        self.provider = provider
        self.rows = np.zeros(slots, ROW)
        self.positions = np.zeros(slots, np.int64)  # number of tokens that each row's state has seen
        self._gpu, self._decoder, self._device = gpu, decoder, DEVICES[provider]
        self.session = open_graph(graph, threads=0, provider=provider, gpu_memory_gib=gpu_memory_gib, promised=gpu.graph, whole=True)
        copies, room = RowCopies(decoder, provider), _power_of_two(slots)
        self.states = tuple(DeviceStates(decoder, room, copies, self._device) for _ in range(2))
        self._now = 0  # which of the two has the rows' current states
        self._bound: dict[tuple[int, int], BoundGraph] = {}

    @property
    def current(self) -> DeviceStates:
        """The current states. The next step writes the other ones."""
        return self.states[self._now]

    def put(
        self, row: int, *, seed: int, temperature: float, top_k: int = 0, top_p: float = 1.0, states: Any = None, position: int = 0
    ) -> None:
        """Begin a run in this row, from these states. With temperature 0 it draws the likeliest token."""
        self.rows[row] = (seed, temperature or 1.0, top_k if temperature else 1, top_p)
        self.positions[row] = position
        self.current.put(row, states)

    def step(self, tokens: Ids) -> Ids:
        """Feed a token to each of the first rows, and return the next tokens: (B,) -> (B,). An id of -1 could not be drawn in the graph."""
        B = len(tokens)
        bound, rows = self.bound(_power_of_two(B)), self.rows[:B]
        arrays = bound.arrays
        drawn = uniform(rows["seed"], (self.positions[:B] + 1).astype(np.uint64))
        values = {contract.TOKENS: tokens, contract.UNIFORM: np.where(rows["top_k"] == 1, 0, drawn), contract.POSITIONS: self.positions[:B]}
        values |= {name: rows[name] for name in (contract.TEMPERATURE, contract.TOP_K, contract.TOP_P)}
        for name, array in arrays.items():
            array[:B] = values[name]
        ids: Ids = bound((contract.DRAWN,))[contract.DRAWN][:B]
        self.positions[:B] += 1
        self._now ^= 1
        return ids

    def bound(self, rows: int) -> BoundGraph:
        """Return the graph for this number of rows, from the current states to the other ones."""
        if (found := self._bound.get((rows, self._now))) is None:
            now, then = self.states[self._now], self.states[self._now ^ 1]
            fields = {tensor.name: _field(tensor, rows) for tensor in (*self._gpu.graph.inputs, *self._gpu.graph.outputs)}
            states = self._decoder.states
            found = self._bound[rows, self._now] = BoundGraph(
                self.session,
                self._device,
                inputs={tensor.name: fields[tensor.name] for tensor in self._gpu.graph.inputs if not tensor.name.startswith("state_")},
                outputs={contract.DRAWN: fields[contract.DRAWN]},
                kept_inputs={state.name: Placed(fields[state.name], at) for state, at in zip(states, now.addresses(0), strict=True)},
                kept_outputs={state.output: Placed(fields[state.output], at) for state, at in zip(states, then.addresses(0), strict=True)},
                graph_id=2 * rows + self._now,
            )
            for name, value in {contract.TEMPERATURE: 1, contract.TOP_P: 1}.items():
                found.arrays[name][:] = value  # also in unused rows
        return found


def _field(tensor: contract.Tensor, rows: int) -> Field:
    return Field(tensor.dtype, tuple(rows if axis == "B" else int(axis) for axis in tensor.shape))


def _power_of_two(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
