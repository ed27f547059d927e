"""Measures one layer at one length N in a new process, so that no other layer's memory is measured.

    python -m export.comparison.child REQUEST

`growth.py` writes REQUEST, which is JSON; the result is one line of JSON on stdout. All runs use one thread, because the page compares how
cost grows with length. torch is imported only if torch is measured.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], object]

LEAST_RUNS, LONG_ENOUGH_S = 3, 6.0  # a layer runs at least 3 times, unless fewer runs already take 6 s


def main(request: dict[str, Any]) -> dict[str, float]:
    """Measure a request {"graph" or "mechanism", "plan", "N", "seconds"}. Returns {"s", "runs", "peak_bytes"}.

    "s" is the time of the fastest run, because other work on the machine can only make a run slower. "peak_bytes" is the memory of the
    first run.
    """
    N, D = request["N"], request["plan"]["d_model"]
    x = np.random.default_rng(0).standard_normal((1, N, D), dtype=np.float32)
    feed = {"x": x, "mask": np.ones((1, N), dtype=bool)}
    for_memory, for_time = _torch(request, feed) if request["plan"]["runtime"] == "torch" else _onnxruntime(request, feed)
    peak_bytes = _peak_bytes(for_memory)
    times = _times(for_time, request["seconds"])
    return {"s": min(times), "runs": len(times), "peak_bytes": peak_bytes}


def _onnxruntime(request: dict[str, Any], feed: dict[str, Any]) -> tuple[Run, Run]:
    """Return two functions that run the graph: one to measure memory, one to measure time. Memory is measured without onnxruntime's arena,
    which keeps more memory than it uses; time is measured with the arena, as a server runs.
    """
    import onnxruntime as ort

    def session(*, arena: bool) -> Run:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = arena
        options.log_severity_level = 4
        opened = ort.InferenceSession(request["graph"], options, providers=["CPUExecutionProvider"])
        return lambda: opened.run(None, feed)

    return session(arena=False), session(arena=True)


def _torch(request: dict[str, Any], feed: dict[str, Any]) -> tuple[Run, Run]:
    import torch

    from export.comparison.mechanisms import build
    from export.comparison.plan import ComparisonPlan

    plan = ComparisonPlan.model_validate(request["plan"])
    torch.set_num_threads(1)
    layer = build(request["mechanism"], plan.d_model, plan.n_heads, longest=plan.longest)
    x, mask = torch.from_numpy(feed["x"]), torch.from_numpy(feed["mask"])

    def run() -> object:
        with torch.inference_mode():
            return layer(x, mask)

    return run, run


def _times(run: Run, seconds: float) -> list[float]:
    """Return the CPU seconds of each run. CPU time excludes other work on the machine. The first run, which allocates memory, is not
    counted."""
    run()
    times = [_time(run)]
    while sum(times) < seconds or (len(times) < LEAST_RUNS and sum(times) < LONG_ENOUGH_S):
        times.append(_time(run))
    return times


def _time(run: Run) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def _peak_bytes(run: Run) -> int:
    """Return by how many bytes the resident memory rises during the run."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM), see man 5 proc
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """Return the bytes in this field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
