"""Finds the number of CPUs that this process may use, and divides them among its threads."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CpuBudget:
    """The number of CPUs that this process may use, and the numbers of runtime threads and tokenizer threads that share these CPUs."""

    cpus: int
    runtime_threads: int
    tokenizer_threads: int


def share_out(cpus: int, *, runtime_threads: int | None = None) -> CpuBudget:
    """Assign one CPU in eight to tokenising bulk work, and the rest to the runtime.

    With fewer than eight CPUs, the thread that tokenises has no CPU of its own, because this CPU would mostly be idle.
    """
    tokenizer_threads = cpus // 8
    threads = runtime_threads or max(cpus - tokenizer_threads, 1)
    return CpuBudget(cpus=cpus, runtime_threads=threads, tokenizer_threads=max(tokenizer_threads, 1))


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPUs in the affinity mask, at most the cgroup's quota (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(cpus, round(quota)) if quota else cpus)


def _quota(cgroup: Path) -> float | None:
    """Return the cgroup's quota in CPUs, or None if there is no quota."""
    with suppress(OSError, ValueError):
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    return None
