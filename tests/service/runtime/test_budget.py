"""CPUs that are ours, and who gets them."""

import os
from pathlib import Path

import pytest

from service.runtime.budget import CpuBudget, available_cpus, share_out


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def v2(folder: Path, text: str) -> Path:
    (folder / "cpu.max").write_text(text)
    return folder


def v1(folder: Path, quota_us: int, period_us: int = 100_000) -> Path:
    (folder / "cpu").mkdir()
    (folder / "cpu/cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (folder / "cpu/cpu.cfs_period_us").write_text(f"{period_us}\n")
    return folder


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("50000 100000\n", 1),
        ("10000 100000\n", 1),
        ("350000 100000\n", 4),
        ("6400000 100000\n", 16),
        ("nonsense\n", 16),
        ("", 16),
    ],
)
def test_the_quota_of_cgroup_v2_lowers_the_affinity(tmp_path: Path, text: str, cpus: int) -> None:
    assert available_cpus(v2(tmp_path, text)) == cpus


@pytest.mark.parametrize(("quota_us", "cpus"), [(-1, 16), (200_000, 2), (20_000, 1), (3_200_000, 16)])
def test_the_quota_of_cgroup_v1_lowers_the_affinity(tmp_path: Path, quota_us: int, cpus: int) -> None:
    assert available_cpus(v1(tmp_path, quota_us)) == cpus


def test_without_a_cgroup_the_affinity_decides(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == 16


@pytest.mark.parametrize("cpus", range(1, 129))
def test_runtime_and_tokenizer_threads_together_fit_the_cpus(cpus: int) -> None:
    """Below eight CPUs the one tokenizer thread shares with the runtime."""
    budget = share_out(cpus)
    assert budget.runtime_threads >= 1
    assert budget.runtime_threads + (budget.tokenizer_threads if cpus >= 8 else 0) == cpus


def test_the_runtime_threads_can_be_set() -> None:
    assert share_out(16, runtime_threads=3) == CpuBudget(cpus=16, runtime_threads=3, tokenizer_threads=2)
