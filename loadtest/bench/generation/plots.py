"""Draws the time per token along a sequence, and the throughput by batch size."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.generation.contestants import Contestants, GenerationPart, GenerationPlan
from loadtest.bench.generation.rows import best_batch, by_batch, measured_with_twin, stretches
from loadtest.bench.runner import Measurements
from loadtest.in_process import batches
from loadtest.in_process.shapes import ModelShape
from loadtest.in_process.steps import Stretch
from loadtest.in_process.twin import crossover, fitted

MiB = 2**20
OURS, TWIN = "tab:blue", "tab:red"


def draw(plan: GenerationPlan, built: Contestants, measured: Measurements, file: Path, hardware: str) -> None:
    """Draw all plots, and save them next to the JSON `file`."""
    if ours := stretches(measured, "bundle"):
        price_of_a_token(
            ours,
            stretches(measured, "bundle's twin"),
            file.with_suffix(".png"),
            f"{plan.model}, {hardware}",
            state_bytes=batches.row_bytes(plan.bundle),
            twin_token_bytes=batches.twin_row_bytes(built.twin, 1) if built.twin else 0,
        )
    if built.paper and GenerationPart.batches in plan.parts:
        title = f"within {plan.memory_bytes / 2**30:g} GiB of states or caches, {hardware}"
        batch_ladder(measured, plan.shapes, file.with_name(f"{file.stem}-batches.png"), title)


def price_of_a_token(
    ours: Sequence[Stretch], twins: Sequence[Stretch], file: Path, title: str, *, state_bytes: int, twin_token_bytes: float
) -> None:
    """Draw the time per token, and the memory that past tokens take, along one sequence. If the twin (the decoder with softmax attention)
    was measured, the line fitted to its times is extended to the length of the bundle's sequence."""
    figure = _figure(8, 6)
    time, memory = figure.subplots(2, 1, sharex=True)
    positions = [stretch.middle for stretch in ours]
    time.plot(positions, _ms(ours), color=OURS, label="constant state")
    memory.plot(positions, [state_bytes / MiB] * len(ours), color=OURS, label="its states, those read and those written")
    gained = [(stretch.rss_bytes - ours[0].rss_bytes) / MiB for stretch in ours]
    memory.plot(positions, gained, ":", color=OURS, label="resident memory of the process, gained since the first thousand tokens")
    if twins:
        _growing(time, ours, twins)
        cached = [stretch.middle for stretch in twins]
        memory.plot(cached, [twin_token_bytes * position / MiB for position in cached], color=TWIN, label="the twin's keys and values")
    time.set_xscale("log")
    time.set_yscale("log")
    time.set_ylabel("ms per token")
    time.set_title(title, fontsize=9)
    time.legend(fontsize=8)
    memory.set_ylabel("MiB")
    memory.set_xlabel("position in the sequence, tokens")
    memory.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def _growing(axes: Any, ours: Sequence[Stretch], twins: Sequence[Stretch]) -> None:
    end, line = twins[-1], fitted(twins)
    axes.plot([stretch.middle for stretch in twins], _ms(twins), color=TWIN, label="softmax twin with a cache")
    far = [end.middle, max(ours[-1].middle, end.middle)]
    axes.plot(far, [line.at(position) * 1000 for position in far], "--", color=TWIN, label="its line")
    axes.plot(end.middle, end.s_per_token * 1000, "o", color=TWIN, label=f"end of its measurement: {end.first + end.tokens:,}")
    if position := crossover(measured_with_twin(ours, twins), twins):
        axes.axvline(position, color="gray", linewidth=0.8, label=f"ours is cheaper from {position:,.0f} on")


def batch_ladder(measured: Measurements, shapes: Sequence[ModelShape], file: Path, title: str) -> None:
    """Draw tokens per second by batch size for each shape. The batch size with the highest throughput is marked. The curve ends at the
    largest batch that fits in memory."""
    figure = _figure(10, 4)
    panels = figure.subplots(1, len(shapes), squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        for who, colour, told in (("ours", OURS, "constant state"), ("twin", TWIN, "softmax twin with a cache")):
            medians = _medians(by_batch(measured, shape, who))
            best = best_batch(by_batch(measured, shape, who))
            axes.plot(list(medians), list(medians.values()), ".-", color=colour, label=told)
            axes.plot(best, medians[best], "o", color=colour, label=f"{medians[best]:,.0f} tokens/s at {best:,}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{shape.name} shape, {shape.steps:,} steps", fontsize=9)
        axes.set_xlabel("batch")
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("tokens/s")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=120)


def _medians(found: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {batch: statistics.median(found[batch]) for batch in sorted(found)}


def _ms(stretches: Sequence[Stretch]) -> list[float]:
    return [stretch.s_per_token * 1000 for stretch in stretches]


def _figure(width: float, height: float) -> Any:
    """Create an empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
