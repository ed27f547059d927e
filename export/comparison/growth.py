"""Measures the time and memory of a layer at each length N, and fits the exponents with which they grow."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from statistics import linear_regression

from export.comparison.plan import ComparisonPlan
from export.comparison.results import Point
from export.errors import ExportError

GROWTH_FROM = 1024  # smallest N for a fit, because at smaller N most of the time does not depend on N
FASTEST = 2.0  # largest assumed exponent of growth, because no mechanism grows faster than N²


class Killed(ExportError):
    """The error for a run that the operating system killed, usually because it used too much memory."""


def measure(name: str, graph: Path, plan: ComparisonPlan, N: int) -> Point:
    """Measure one length in a child process. Raises ExportError with the child's error message, or Killed if the child was killed."""
    request = {"mechanism": name, "graph": str(graph), "plan": plan.model_dump(mode="json"), "N": N, "seconds": plan.seconds}
    done = subprocess.run(
        [sys.executable, "-m", "export.comparison.child", json.dumps(request)], check=False, capture_output=True, text=True
    )
    if done.returncode == -signal.SIGKILL:
        raise Killed(f"the system killed the run at N={N:,}, probably because it used too much memory")
    if done.returncode:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise ExportError(f"{name} cannot be run at N={N} in {plan.runtime}: {said}")
    return Point(N=N, **json.loads(done.stdout.splitlines()[-1]))


def too_much(points: Sequence[Point], N: int, plan: ComparisonPlan) -> str | None:
    """Return the reason why a run at N would exceed a limit of the plan, estimated from smaller N. None if it would not."""
    for what, values, limit, unit in (
        ("memory", [point.peak_bytes for point in points], plan.memory_bytes, 2**30),
        ("a run", [point.s for point in points], plan.longest_run_s, 1),
    ):
        if (expected := extrapolated([point.N for point in points], values, N)) > limit:
            name = "GiB" if unit > 1 else "s"
            return f"{what} at N={N:,} would take some {expected / unit:.3g} {name}, and {limit / unit:.3g} {name} is the limit"
    return None


def extrapolated(lengths: Sequence[int], values: Sequence[float], N: int) -> float:
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


def stated_exponent(work: Callable[[int], float], lengths: Sequence[int]) -> float | None:
    """Return the exponent of a stated cost, fitted over the measured lengths."""
    return exponent(lengths, [work(N) for N in lengths])
