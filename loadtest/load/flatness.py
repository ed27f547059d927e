"""Detects leaks: whether a service's memory, file descriptors, threads, occupied slots and queues grow during a load test."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadtest.load.watch import Observation, stem

MiB = 2**20
_MOST_OBSERVATIONS = 400  # limit on the observations in a fit, because the slope uses all their pairs


class AllowedGrowth(NamedTuple):
    """The growth allowed for a series of values: `share` of its first value or `amount`, whichever is larger."""

    unit: str
    share: float
    amount: float
    scale: float = 1.0  # number of the series' units (such as bytes) in one displayed unit


ALLOWED = {
    "rss_bytes": AllowedGrowth("MiB", 0.02, 4, MiB),  # allocators keep some memory that a burst of requests used
    "threads": AllowedGrowth("threads", 0.0, 2),
}
# Under load most descriptors are connections of clients. A leak is an increase from before the load to after it, when the clients have
# closed their connections. A few descriptors are opened once, at first use, so a small increase is allowed.
FDS = AllowedGrowth("descriptors", 0.0, 8)
LEFT = "left"  # the unit of gauges that count unfinished work


class Flatness(NamedTuple):
    """The growth of one series of values over the observed time. For memory and threads it is computed with the median slope of all pairs
    of values (Theil and Sen)."""

    what: str
    unit: str
    begin: float
    end: float
    growth: float
    flat: bool


def growth(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Return how much a series has grown from its first to its last time. Single outliers have no effect."""
    stride = max(len(at_s) // _MOST_OBSERVATIONS, 1)
    times, sizes = np.array(at_s[::stride], float), np.array(values[::stride], float)
    earlier, later = np.triu_indices(len(times), 1)
    slopes = (sizes[later] - sizes[earlier]) / (times[later] - times[earlier])
    return float(np.median(slopes) * (times[-1] - times[0])) if len(slopes) else 0.0


def at_rest(before: float, after: float) -> bool:
    """Return whether all connections are closed after the load. The arguments are a process's numbers of file descriptors before and after
    the load."""
    return after - before <= FDS.amount


def not_flat(found: Sequence[Flatness]) -> float | None:
    """Return how many series of processes grew more than allowed, or None if no process was observed for the whole time."""
    of_processes = [each for each in found if each.unit != LEFT]
    return float(sum(not each.flat for each in of_processes)) if any(each.unit == "MiB" for each in of_processes) else None


def not_at_rest(found: Sequence[Flatness]) -> float | None:
    """Return how many gauges show work remaining after the load, or None if /metrics did not answer."""
    gauges = [each for each in found if each.unit == LEFT]
    return float(sum(not each.flat for each in gauges)) if gauges else None


def judge(observations: Sequence[Observation], begin_s: float, end_s: float) -> list[Flatness]:
    """Return whether these four have grown: memory and threads of every process that was observed from `begin_s` to `end_s`; its file
    descriptors, from the first to the last observation; the number of processes; and the gauges of unfinished work, which must be 0 after
    the load."""
    within = [each for each in observations if begin_s <= each.at_s <= end_s]
    made = []
    names = {process.pid: stem(process.name) for each in within for process in each.processes}
    for pid, name in sorted(names.items(), key=lambda each: (each[1], each[0])):
        series = [process for each in within for process in each.processes if process.pid == pid]
        if len(series) < max(len(within) * 0.9, 2):
            continue
        for what, allowed in ALLOWED.items():
            values = [getattr(process, what) / allowed.scale for process in series]
            grown = growth([process.at_s for process in series], values)
            flat = grown <= max(allowed.amount, allowed.share * values[0])
            made.append(Flatness(f"{name} ({pid}) {what.partition('_')[0]}", allowed.unit, values[0], values[-1], grown, flat))
        if (ends := [process.fds for each in (observations[0], observations[-1]) for process in each.processes if process.pid == pid])[1:]:
            made.append(Flatness(f"{name} ({pid}) fds at rest", FDS.unit, ends[0], ends[1], ends[1] - ends[0], at_rest(ends[0], ends[1])))
    if within:
        first, last = len(within[0].processes), len(within[-1].processes)
        made.append(Flatness("processes", "processes", first, last, last - first, last <= first))
        busy = {name: float(np.median([each.gauges.get(name, 0.0) for each in within])) for name in within[-1].gauges}
        for name, value in observations[-1].gauges.items():
            left = max(value - (name == "attnserve_active_requests"), 0.0)
            made.append(Flatness(f"{name} at rest", LEFT, busy.get(name, 0.0), left, left, not left))
    return made
