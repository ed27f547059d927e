"""Measures the time and memory of a layer's graph at each length N, and fits the exponents with which they grow.

Each length is measured in a new process, so that no other layer's memory is measured:

    python -m export.comparison.growth GRAPH N D SECONDS
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import linear_regression

import numpy as np
import onnxruntime as ort
from pydantic import BaseModel

from export.errors import ExportError

GROWTH_FROM = 1024  # smallest N for a fit, because at smaller N most of the time does not depend on N
FASTEST = 2.0  # largest assumed exponent of growth, because no mechanism grows faster than N²
LEAST_RUNS, LONG_ENOUGH_S = 3, 6.0  # a layer runs at least 3 times, unless fewer runs already take 6 s


class Killed(ExportError):
    """The error for a run that the operating system killed, usually because it used too much memory."""


class Point(BaseModel):
    """The measurement at one length N, for one sequence (B = 1) on one thread."""

    N: int
    s: float  # CPU seconds of the fastest run, because other work on the machine can only make a run slower
    runs: int
    peak_bytes: int  # peak growth of the resident memory during the first run


def measure(graph: Path, N: int, *, d_model: int, seconds: float) -> Point:
    """Measure one length in a child process. Raises ExportError with the child's error message, or Killed if the child was killed."""
    command = [sys.executable, "-m", "export.comparison.growth", str(graph), str(N), str(d_model), str(seconds)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == -signal.SIGKILL:
        raise Killed(f"the system killed the run at N={N:,}, probably because it used too much memory")
    if done.returncode:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ExportError(f"{graph.name} cannot be run at N={N}: {said}")
    return Point.model_validate_json(done.stdout.splitlines()[-1])


def main(graph: str, N: int, d_model: int, seconds: float) -> Point:
    """Measure in this process. Memory is measured without onnxruntime's arena, which keeps more memory than it uses; time is measured with
    it, as a server runs.
    """
    x = np.random.default_rng(0).standard_normal((1, N, d_model), dtype=np.float32)
    feed = {"x": x, "mask": np.ones((1, N), np.int64)}

    def run(*, arena: bool) -> Callable[[], float]:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = arena
        options.log_severity_level = 4
        opened = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

        def timed() -> float:
            begun = time.thread_time()
            opened.run(None, feed)
            return time.thread_time() - begun

        return timed

    for_memory, for_time = run(arena=False), run(arena=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM), see man 5 proc
    before = _memory("VmRSS")
    for_memory()
    peak_bytes = max(0, _memory("VmHWM") - before)
    for_time()  # the first run allocates memory
    times = [for_time()]
    while sum(times) < seconds or (len(times) < LEAST_RUNS and sum(times) < LONG_ENOUGH_S):
        times.append(for_time())
    return Point(N=N, s=min(times), runs=len(times), peak_bytes=peak_bytes)


def _memory(field: str) -> int:
    """Return the bytes in this field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def too_much(points: Sequence[Point], N: int, *, memory_bytes: int, longest_run_s: float) -> str | None:
    """Return the reason why a run at N would exceed a limit, estimated from smaller N. None if it would not."""
    for what, values, limit, unit in (
        ("memory", [point.peak_bytes for point in points], memory_bytes, 2**30),
        ("a run", [point.s for point in points], longest_run_s, 1),
    ):
        if (expected := _extrapolated([point.N for point in points], values, N)) > limit:
            name = "GiB" if unit > 1 else "s"
            return f"{what} at N={N:,} would take some {expected / unit:.3g} {name}, and {limit / unit:.3g} {name} is the limit"
    return None


def _extrapolated(lengths: Sequence[int], values: Sequence[float], N: int) -> float:
    """Return an upper estimate of the value at N, or 0 for fewer than two lengths. It assumes that growth continues with the exponent of
    the last two lengths plus 1/4, but at most 2.
    """
    if len(lengths) < 2 or values[-2] <= 0:
        return 0.0
    slope = log(max(values[-1] / values[-2], 1.0)) / log(lengths[-1] / lengths[-2])
    growth: float = (N / lengths[-1]) ** min(FASTEST, slope + 0.25)
    return values[-1] * growth


def exponent(lengths: Sequence[int], values: Sequence[float], *, begin: int = GROWTH_FROM) -> float | None:
    """Fit value ~ N^p by least squares on the logarithms for N >= `begin`, and return p. None if fewer than three values are positive."""
    pairs = [(log(N), log(value)) for N, value in zip(lengths, values, strict=True) if begin <= N and value > 0]
    return linear_regression(*zip(*pairs, strict=True)).slope if len(pairs) >= 3 else None


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])).model_dump_json())
