"""Measures the memory and CPU time of a command: of its process and all descendants.

Memory is the proportional set size (PSS): a page that n processes share counts 1/n in each, so the sum over processes counts it once.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from loadtest.errors import LoadtestError

# Errors that psutil raises for a process that has ended, or that belongs to another user.
GONE = (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError)


def measure(root: int) -> list[tuple[str, int]]:
    """Return name and PSS in bytes of the process with the id `root` and of all its descendants. The largest comes first."""
    found = []
    for process in tree(root):
        with suppress(*GONE, AttributeError):  # AttributeError: psutil measures the PSS on Linux only
            found.append((name(process), process.memory_full_info().pss))
    if not found:
        raise LoadtestError(f"/proc/{root}/smaps_rollup cannot be read: memory is measured on Linux, as the user of the service")
    return sorted(found, key=lambda each: -each[1])


def tree(root: int) -> list[psutil.Process]:
    """Return the process with the id `root` and all its descendants, or an empty list if it has ended."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(root)
        return [first, *first.children(recursive=True)]
    return []


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of the processes in seconds, user and system."""
    used = 0.0
    for process in processes:
        with suppress(*GONE):
            used += sum(process.cpu_times()[:2])
    return used


def name(process: psutil.Process) -> str:
    """Return a short name of the process: its title, its program, or the script or module that Python runs."""
    words: list[str] = []
    with suppress(*GONE):
        words = " ".join(process.cmdline()).split()
    if not words:
        return f"pid {process.pid}"
    if words[0].startswith("ray::"):
        return words[0].partition(".")[0]  # without the method that the process runs at this moment
    program, *rest = words
    if "python" in Path(program).name:
        program = next((word for word in rest if not word.startswith("-")), program)
    return Path(program).name
