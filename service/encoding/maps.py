"""Computes the attention weights of a text with a bundle's attention graph, one text at a time, on a thread of its own."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from export import contract
from service.encoding.request import NO_DEADLINE
from service.errors import DeadlineExceeded, Overloaded, RuntimeFailed
from service.runtime.onnx import Array, in_a_line, shrinking

log = logging.getLogger("attnserve")

_MOST_WAITING = 8  # largest number of waiting texts of all models together; each takes milliseconds
_RETRY_AFTER_S = 1.0


class AttentionMaps:
    """The attention graphs of one process. A graph is opened when the first text needs it. One thread computes one text after another."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maps")
        self._sessions: dict[str, Any] = {}  # ONNX sessions by the bundle's fingerprint; used by the thread only
        self._waiting = 0  # number of waiting texts; used on the event loop only

    async def of(
        self, bundle: Path, manifest: contract.Manifest, ids: Sequence[int], layers: Sequence[int], deadline: float = NO_DEADLINE
    ) -> list[Array]:
        """Return the attention weights (H, N, N) of each of these layers. Raises Overloaded, DeadlineExceeded, RuntimeFailed."""
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(
                f"{self._waiting} texts already wait for their attention weights, which is the most", retry_after_s=_RETRY_AFTER_S
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(None if deadline == NO_DEADLINE else max(deadline - time.monotonic(), 0)):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, bundle, manifest, ids, layers)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its attention weights were computed") from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Finish the current text and cancel the waiting texts."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, bundle: Path, manifest: contract.Manifest, ids: Sequence[int], layers: Sequence[int]) -> list[Array]:
        try:
            session = self._sessions.get(manifest.fingerprint) or self._open(bundle, manifest)
            outputs = [contract.attention_output(layer) for layer in layers]
            found: list[Array] = session.run(outputs, {contract.INPUT_IDS: np.array([ids], np.int64)}, shrinking())
        except Exception as error:
            log.exception("attention graph failed", extra={"model": manifest.name, "tokens": len(ids)})
            raise RuntimeFailed("the attention graph failed; the log says why") from error
        if not all(np.isfinite(A).all() for A in found):
            raise RuntimeFailed("the weights for this text are not finite; they were withheld")
        return found

    def _open(self, bundle: Path, manifest: contract.Manifest) -> Any:
        session = self._sessions[manifest.fingerprint] = _opened(bundle, manifest)
        log.info("opened attention graph", extra={"model": manifest.name})
        return session


def check_maps(bundle: Path, manifest: contract.Manifest) -> None:
    """Run the attention graph with two tokens. Raises BundleError if an output is not finite or not of the manifest's shape."""
    if manifest.attention_graph is None:
        return
    graph = bundle / manifest.attention_graph.file
    wanted = {contract.attention_output(at): (layer.heads, 2, 2) for at, layer in enumerate(manifest.attention_graph.layers)}
    try:
        made = _opened(bundle, manifest, optimised=False).run(list(wanted), {contract.INPUT_IDS: np.zeros((1, 2), np.int64)})
    except Exception as error:  # ONNX Runtime's errors have no other base class
        raise contract.BundleError(f"{graph}: self-test failed: {in_a_line(error)}. Export the bundle again.") from error
    for (name, shape), A in zip(wanted.items(), made, strict=True):
        if A.shape != shape or not np.isfinite(A).all():
            raise contract.BundleError(f"{graph}: self-test failed, {name} is {A.shape} and should be {shape}, all of it finite")


def _opened(bundle: Path, manifest: contract.Manifest, *, optimised: bool = True) -> Any:
    import onnxruntime as ort

    assert manifest.attention_graph is not None
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # one thread for the graph, so that engines can use the other cores
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(bundle / manifest.attention_graph.file), options, providers=["CPUExecutionProvider"])
