"""Runs an encoder's graph for GPUs. The host packs the texts; one copy takes the inputs to the GPU, and one brings the vectors back.

Inputs have one of a few shapes (`packing.py`). Their memory is bound once, so CUDA can record the kernels of a shape at its first run and
launch all of them by one call afterwards. The code works with the device of any ONNX Runtime provider, so tests run it on a CPU.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

from export import contract
from service.encoding.gpu.packing import MOST_TOKENS, buckets, cuts, pack, smallest
from service.runtime.bound import BoundGraph
from service.runtime.onnx import CUDA, DEVICES, Array, OnnxSession, Session, open_graph, with_provider


def open_session(
    bundle: Path, manifest: contract.Manifest, *, threads: int, provider: str = "auto", gpu_memory_gib: float | None = None
) -> Session:
    """Open an encoder: the graph for GPUs if the bundle has one and `provider` selects the GPU, else the served graph."""

    def served(chosen: str) -> OnnxSession:
        return OnnxSession(bundle, manifest, threads=threads, provider=chosen, gpu_memory_gib=gpu_memory_gib)

    if (gpu := manifest.gpu_graph) is None:
        return served(provider)

    def opened(chosen: str) -> Session:
        if chosen != CUDA:
            return served("cpu")
        graph, longest = bundle / gpu.graph.file, manifest.limits.max_tokens
        session = PackedSession(graph, gpu, max_tokens=longest, gpu_memory_gib=gpu_memory_gib, others=partial(served, "cuda"))
        session.warm_up()
        return session

    return with_provider(provider, manifest.name, opened)


class PackedSession:
    """A bundle's graph for GPUs. Threads take turns, because all runs of a bucket use the same memory."""

    def __init__(
        self,
        graph: Path,
        gpu: contract.GpuGraph,
        *,
        max_tokens: int,
        most_tokens: int = MOST_TOKENS,
        provider: str = CUDA,
        gpu_memory_gib: float | None = None,
        others: Callable[[], Session] | None = None,
    ) -> None:
        """`most_tokens` is T of the largest bucket. `others` opens a session for outputs that this graph does not have, e.g. the vectors of
        tokens; it is called when they are first requested. Raises SettingsConflict if the GPU cannot be used, or not for every operator.
        """
        self._others = None if others is None else cache(others)
        self.graph = graph
        self.provider = provider
        self.buckets = buckets(max_tokens, most_tokens=most_tokens)
        self.outputs = tuple(tensor.name for tensor in gpu.graph.outputs)
        self.session = open_graph(graph, threads=0, provider=provider, gpu_memory_gib=gpu_memory_gib, promised=gpu.graph, whole=True)
        self._bound: list[BoundGraph | None] = [None] * len(self.buckets)
        assert gpu.pooling is not None
        self._pooling = gpu.pooling
        self._gpu = gpu
        self._lock = threading.Lock()

    def run(
        self,
        outputs: Sequence[str],
        ids: Sequence[list[int]],
        type_ids: Sequence[list[int]] | None,
        unattended: Sequence[int] = (),
        *,
        alone: bool = True,
    ) -> dict[str, Array]:
        """Compute outputs as `service.runtime.onnx.Session.run` does."""
        if self._others is not None and (any(unattended) or not set(outputs) <= set(self.outputs)):
            return self._others().run(outputs, ids, type_ids, unattended, alone=alone)
        lengths = [len(each) for each in ids]
        pieces: dict[str, list[Array]] = {name: [] for name in outputs}
        for piece in cuts(lengths, self.buckets[-1]):
            at = smallest(self.buckets, tokens=sum(lengths[piece]), texts=len(lengths[piece]))
            with self._lock:
                bound = self.bound(at)
                pack(bound.arrays, self._pooling, ids[piece], None if type_ids is None else type_ids[piece])
                computed = bound(outputs)
            for name, rows in computed.items():
                pieces[name].append(rows[: len(lengths[piece])])
        return {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in pieces.items()}

    def begin(self, ids: list[int], *, within_s: float) -> None:
        """Run one input. A run on a GPU is so short that `within_s` does not stop it."""
        self.run(self.outputs, [ids], None)

    def warm_up(self) -> None:
        """Run every bucket once, so that no request waits for the recording of a CUDA graph."""
        with self._lock:
            for at in range(len(self.buckets)):
                bound = self.bound(at)
                pack(bound.arrays, self._pooling, [[0]], None)
                bound(())

    def bound(self, at: int) -> BoundGraph:
        """Return the graph with the memory of this bucket, which is allocated at the first call."""
        if (found := self._bound[at]) is None:
            graph, bucket = self._gpu.graph, self.buckets[at]
            inputs, outputs = ({tensor.name: bucket.field(tensor) for tensor in side} for side in (graph.inputs, graph.outputs))
            device = DEVICES[self.provider]
            found = self._bound[at] = BoundGraph(self.session, device, inputs=inputs, outputs=outputs, graph_id=at + 1)
        return found
