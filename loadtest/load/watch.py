"""Observes the processes of a service on this machine, and its gauges, while a load runs."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil

from loadtest.common import memory

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
    cpu_s: float  # since it began


class Observation(NamedTuple):
    """The service's processes and gauges at one moment. `gauges` are sums over models; empty if /metrics does not answer in time."""

    at_s: float
    processes: list[ProcessUsage]
    gauges: dict[str, float]


def service_pid(url: str) -> int | None:
    """The first process of the service on this port: the topmost `attnserve` above the process that listens. None if the service is on
    another machine, or if another program listens for it (`kubectl port-forward`, Docker's proxy)."""
    parts = urlsplit(url)
    port = parts.port or _PORTS[parts.scheme]
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # on macOS only root sees those of others
        return None
    listening: list[int] = [each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid]
    if not listening:
        return None
    found = psutil.Process(min(listening))
    ours: list[int] = [each.pid for each in (found, *found.parents()) if memory.name(each.pid) in _OURS]
    return ours[-1] if ours else None


def observe(root: int | None, url: str, key: str = "") -> Observation:
    """At the process `root` and all below it, and at /metrics."""
    now = time.time()
    return Observation(now, [] if root is None else processes(root, now), gauges(url, key))


def processes(root: int, now: float) -> list[ProcessUsage]:
    found = []
    for pid in memory.tree(root):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            with process.oneshot():
                cpu = process.cpu_times()
                sizes = (process.memory_info().rss, process.num_fds(), process.num_threads())
                found.append(ProcessUsage(now, pid, memory.name(pid), *sizes, cpu.user + cpu.system))
    return found


def gauges(url: str, key: str = "") -> dict[str, float]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{url}/metrics", headers=headers), timeout=5) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException):
        return {}
    return summed(text)


def summed(text: str) -> dict[str, float]:
    """Each gauge of GAUGES in a Prometheus text, summed over its labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in GAUGES:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def stem(name: str) -> str:
    """A process's name without what it is doing, which Ray adds to those of its own."""
    return name.partition(".")[0] if name.startswith("ray::") else name


def cores(observations: Sequence[Observation], begin_s: float, end_s: float) -> dict[str, float]:
    """Processor time per second between two moments, by name, of processes that lived all the while."""
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
    """A list that grows by an observation every `interval_s` seconds while the block runs."""
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
