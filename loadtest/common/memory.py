"""Memory and processor time of all processes of a command, read from /proc.

Proportional set size (PSS): a page shared by n processes counts 1/n in each, so the sum over processes counts it once.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loadtest.errors import LoadtestError

T = TypeVar("T")
PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    pss_bytes: int


def measure(root: int, proc: Path = PROC) -> list[Process]:
    """The process `root` and all below it, largest first."""
    found = [Process(pid, name(pid, proc), pss) for pid in tree(root, proc) if (pss := pss_of(pid, proc)) is not None]
    if not found:
        raise LoadtestError(f"{proc / str(root) / 'smaps_rollup'} cannot be read: memory is measured on Linux, as the user of the service")
    return sorted(found, key=lambda process: -process.pss_bytes)


def tree(root: int, proc: Path = PROC) -> list[int]:
    """`root` and every process that descends from it."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (parent := parent_of(int(entry.name), proc)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def parent_of(pid: int, proc: Path = PROC) -> int | None:
    """Field 4 of /proc/PID/stat, counted after the name, which is in brackets and may hold anything."""
    return _read(proc / str(pid) / "stat", lambda text: int(text.rpartition(")")[2].split()[1]))


def pss_of(pid: int, proc: Path = PROC) -> int | None:
    """Bytes; None when the process is gone."""
    return _read(proc / str(pid) / "smaps_rollup", parse_pss)


def parse_pss(rollup: str) -> int:
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError("smaps_rollup without a line `Pss:`")


def cpu_s(pids: Iterable[int], proc: Path = PROC) -> float:
    """Processor time the processes have used, user and system."""
    ticks = [_read(proc / str(pid) / "stat", lambda text: sum(map(int, text.rpartition(")")[2].split()[11:13]))) for pid in pids]
    return sum(filter(None, ticks)) / os.sysconf("SC_CLK_TCK")


def name(pid: int, proc: Path = PROC) -> str:
    """A short name of the process: its title, its program, or the script or module that Python runs."""
    words = (_read(proc / str(pid) / "cmdline", str) or "").replace("\0", " ").split()
    if not words:
        return f"pid {pid}"
    if words[0].startswith("ray::"):
        return " ".join(words)
    program, *rest = words
    if "python" in Path(program).name:
        program = next((word for word in rest if not word.startswith("-")), program)
    return Path(program).name


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    try:
        return parse(path.read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
        return None
