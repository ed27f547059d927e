"""Draws pictures of a load test: latency by rate, percentiles over time, tokens per second, and the service's processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.load.figures import StageFigures
from loadtest.load.knee import Knee
from loadtest.load.samples import Sample, StageStart
from loadtest.load.watch import Observation

MiB = 2**20
_PERCENTILES = (50, 95, 99)
_NAMED = 8  # number of processes, the largest ones, that have a line in the plot


def latency_by_rate(steps: Sequence[StageFigures], knee: Knee | None, file: Path, title: str) -> None:
    """Draw the latency of each step of a ramp against the step's arrival rate, and mark the knee."""
    figure, axes = _figure(1)
    offered = [step.all.offered_per_s for step in steps]
    for name in ("p50_ms", "p95_ms", "p99_ms"):
        axes[0].plot(offered, [getattr(step.all, name) or np.nan for step in steps], ".-", label=name.removesuffix("_ms"))
    if knee:
        told = "knee" if knee.reached else "last step, the knee is further on"
        axes[0].axvline(knee.stage.all.offered_per_s, color="gray", linewidth=0.8, label=f"{told}: {knee.rate:,.1f}/s answered")
    axes[0].set_yscale("log")
    axes[0].set_xlabel("arrivals per second")
    axes[0].set_ylabel("latency, ms")
    _finish(figure, axes, file, title)


def percentiles_over_time(samples: Sequence[Sample], begun: Sequence[StageStart], file: Path, title: str) -> None:
    """Draw the latency of good answers by the time at which their requests were due, and below it the requests per second that were due,
    answered and refused."""
    figure, (latency, rate) = _figure(2)
    start, width, bins = _bins(samples, begun)
    good = _by_bin([sample for sample in samples if sample.good and sample.kind != "hostile"], start, width, bins)
    middles = (np.arange(bins) + 0.5) * width
    for n in _PERCENTILES:
        latency.plot(middles, [np.percentile([s.ms for s in each], n) if each else np.nan for each in good], ".-", label=f"p{n}")
    latency.set_yscale("log")
    latency.set_ylabel("latency, ms")
    for label, wanted in _COUNTED:
        counts = [len(each) / width for each in _by_bin([s for s in samples if wanted(s)], start, width, bins)]
        rate.plot(middles, counts, label=label)
    rate.set_ylabel("requests per second, when due")
    rate.set_xlabel("s")
    _mark_stages((latency, rate), begun, start)
    _finish(figure, (latency, rate), file, title)


_COUNTED: tuple[tuple[str, Callable[[Sample], bool]], ...] = (
    ("arrived", lambda sample: True),
    ("answered", lambda sample: sample.good),
    ("refused", lambda sample: sample.status == 429),
)


def tokens_over_time(samples: Sequence[Sample], begun: Sequence[StageStart], file: Path, title: str) -> None:
    """Draw the tokens that the service reads or samples per second for each kind of client. They are counted when an answer is complete."""
    figure, (axes,) = _figure(1)
    start, width, bins = _bins(samples, begun)
    for kind in sorted({sample.kind for sample in samples if sample.tokens}):
        done = [sample._replace(due_s=sample.done_s) for sample in samples if sample.kind == kind and sample.good]
        per_s = [sum(s.tokens for s in each) / width for each in _by_bin(done, start, width, bins)]
        axes.plot((np.arange(bins) + 0.5) * width, per_s, ".-", label=kind)
    axes.set_ylabel("tokens per second")
    axes.set_xlabel("s")
    _mark_stages((axes,), begun, start)
    _finish(figure, (axes,), file, title)


def processes_over_time(observations: Sequence[Observation], begun: Sequence[StageStart], file: Path, title: str) -> None:
    """Draw the resident memory of the largest processes, the descriptors and threads of all processes, and the service's gauges."""
    figure, panels = _figure(4)
    start = observations[0].at_s
    pids = {process.pid: process for seen in observations for process in seen.processes}
    for pid in sorted(pids, key=lambda pid: -pids[pid].rss_bytes)[:_NAMED]:
        series = [process for seen in observations for process in seen.processes if process.pid == pid]
        panels[0].plot([p.at_s - start for p in series], [p.rss_bytes / MiB for p in series], label=f"{pids[pid].name[:40]} ({pid})")
    times = [seen.at_s - start for seen in observations]
    panels[0].set_ylabel("resident, MiB")
    for panel, what in ((panels[1], "fds"), (panels[2], "threads")):
        panel.plot(
            times, [sum(getattr(process, what) for process in seen.processes) for seen in observations], label=f"{what}, all processes"
        )
    for name in sorted({name for seen in observations for name in seen.gauges}):
        panels[3].plot(times, [seen.gauges.get(name, np.nan) for seen in observations], label=name)
    panels[3].set_yscale("symlog")
    panels[3].set_xlabel("s")
    _mark_stages(panels, begun, start)
    _finish(figure, panels, file, title)


def _bins(samples: Sequence[Sample], begun: Sequence[StageStart]) -> tuple[float, float, int]:
    """Return the beginning of the first time bin, the width in seconds and the number of bins: about 100 of at least a second each."""
    start = begun[0].begin_s
    seconds = max(begun[-1].begin_s, *(sample.done_s for sample in samples)) - start
    width = max(seconds / 100, 1.0)
    return start, width, int(seconds / width) + 1


def _by_bin(samples: Sequence[Sample], start: float, width: float, bins: int) -> list[list[Sample]]:
    found: list[list[Sample]] = [[] for _ in range(bins)]
    for sample in samples:
        if 0 <= (at := int((sample.due_s - start) / width)) < bins:
            found[at].append(sample)
    return found


def _mark_stages(panels: Sequence[Any], begun: Sequence[StageStart], start: float) -> None:
    for stage in begun:
        for axes in panels:
            axes.axvline(stage.begin_s - start, color="lightgray", linewidth=0.8)
        panels[0].text(stage.begin_s - start, 1.0, f" {stage.name}", transform=panels[0].get_xaxis_transform(), fontsize=6, va="top")


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 + 2.2 * panels), layout="constrained")
    axes: Any = figure.subplots(panels, 1, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _finish(figure: Any, panels: Sequence[Any], file: Path, title: str) -> None:
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="upper left")
    figure.suptitle(title, fontsize=8)
    figure.savefig(file, dpi=110)
