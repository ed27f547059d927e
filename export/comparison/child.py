"""One length of one layer, in a process of its own, so that its memory is its own: python -m export.comparison.child REQUEST

REQUEST is JSON, as `growth.py` writes it; the answer is a line of JSON on stdout. On one thread, since it is the growth that is asked for.
torch is imported only where it is what is measured.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], object]

LEAST_RUNS, LONG_ENOUGH_S = 3, 6.0  # of what is slow, unless fewer runs take so long


def main(request: dict[str, Any]) -> dict[str, float]:
    """{"graph" or "mechanism", "plan", "N", "seconds"} -> {"s": of the fastest run, "runs", "peak_bytes": what the first run took}.

    The fastest: what else the machine does slows a run through the caches that it shares, and never makes one faster.
    """
    N, D = request["N"], request["plan"]["d_model"]
    x = np.random.default_rng(0).standard_normal((1, N, D), dtype=np.float32)
    feed = {"x": x, "mask": np.ones((1, N), dtype=bool)}
    for_memory, for_time = _torch(request, feed) if request["plan"]["runtime"] == "torch" else _onnxruntime(request, feed)
    peak_bytes = _peak_bytes(for_memory)
    times = _times(for_time, request["seconds"])
    return {"s": min(times), "runs": len(times), "peak_bytes": peak_bytes}


def _onnxruntime(request: dict[str, Any], feed: dict[str, Any]) -> tuple[Run, Run]:
    """Memory without an arena, which keeps more than it uses; time with it, as a server runs."""
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
    from export.comparison.plan import Plan

    plan = Plan.model_validate(request["plan"])
    torch.set_num_threads(1)
    layer = build(request["mechanism"], plan.d_model, plan.n_heads, longest=plan.longest)
    x, mask = torch.from_numpy(feed["x"]), torch.from_numpy(feed["mask"])

    def run() -> object:
        with torch.inference_mode():
            return layer(x, mask)

    return run, run


def _times(run: Run, seconds: float) -> list[float]:
    """Of the thread, not of the clock: what else the machine does is not in it. The first run, in which memory is got, is left out."""
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
    """How far resident memory rises above what it was before the run."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew; man 5 proc
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
