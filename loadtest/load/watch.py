"""Observes the processes of a service on this machine, and its gauges, while a load runs."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from loadtest.common import memory
from loadtest.common.server import metrics

GAUGES = ("te_queue_size", "attnserve_queue_tokens", "attnserve_active_requests", "vllm:num_requests_running", "vllm:num_requests_waiting")
_PORTS = {"http": 80, "https": 443}
_OURS = ("attnserve", "service.cli")


class ProcessUsage(NamedTuple):
    at_s: float
    pid: int
    name: str
    rss_bytes: int
    fds: int
    threads: int
    cpu_s: float  # CPU seconds since the process began


class Observation(NamedTuple):
    """The service's processes and gauges at one moment. `gauges` are sums over models; empty if /metrics does not answer in time."""

    at_s: float
    processes: list[ProcessUsage]
    gauges: dict[str, float]


def service_pid(url: str) -> int | None:
    """Return the id of the service's first process: the topmost `attnserve` among the process that listens on the port of `url` and its
    ancestors. None if the service is on another machine, or if another program listens for it (`kubectl port-forward`, Docker's proxy)."""
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # on macOS only root may see other users' processes
        return None
    listening: list[int] = [each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid]
    if not listening:
        return None
    found = psutil.Process(min(listening))
    ours: list[int] = [each.pid for each in (found, *found.parents()) if memory.name(each) in _OURS]
    return ours[-1] if ours else None


def observe(root: int | None, url: str, key: str = "") -> Observation:
    """Observe the process `root` and its descendants, and read /metrics."""
    now = time.time()
    return Observation(now, [] if root is None else processes(root, now), gauges(url, key))


def processes(root: int, now: float) -> list[ProcessUsage]:
    found = []
    for process in memory.tree(root):
        with suppress(*memory.GONE), process.oneshot():
            sizes = (process.memory_info().rss, process.num_fds(), process.num_threads())
            found.append(ProcessUsage(now, process.pid, memory.name(process), *sizes, memory.cpu_s([process])))
    return found


def gauges(url: str, key: str = "") -> dict[str, float]:
    try:
        return metrics(url, GAUGES, key, timeout_s=5)
    except (OSError, HTTPException):
        return {}


def stem(name: str) -> str:
    """Return a process's name without the current activity, which Ray appends to it."""
    return name.partition(".")[0] if name.startswith("ray::") else name


def cores(observations: Sequence[Observation], begin_s: float, end_s: float) -> dict[str, float]:
    """Return process name -> CPU seconds per second between `begin_s` and `end_s`. Only processes that existed throughout are counted."""
    within = [each for each in observations if begin_s - 1 <= each.at_s <= end_s + 1 and each.processes]
    if len(within) < 2:
        return {}
    first, last = within[0], within[-1]
    before = {process.pid: process.cpu_s for process in first.processes}
    used: dict[str, float] = {}
    for process in last.processes:
        if process.pid in before:
            name = stem(process.name)
            used[name] = used.get(name, 0.0) + (process.cpu_s - before[process.pid]) / (last.at_s - first.at_s)
    return used


@contextmanager
def observing(root: int | None, url: str, interval_s: float, key: str = "") -> Iterator[list[Observation]]:
    """Yield a list that grows by one observation every `interval_s` seconds during the `with` block."""
    observations: list[Observation] = [observe(root, url, key)]
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(interval_s):
            observations.append(observe(root, url, key))

    thread = threading.Thread(target=go_on, name="watch", daemon=True)
    thread.start()
    try:
        yield observations
    finally:
        stop.set()
        thread.join()
