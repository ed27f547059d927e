"""Draws time and memory against N for each kind of mechanism, and the effective rank against the width of a head."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from export.comparison.mechanisms import EVERYTHING
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Point, Result

MiB = 2**20
SHOWN_EVERYWHERE = ("softmax", "linear")  # drawn in every panel as references for growth like N² and N
STYLES = ("-", "--", ":", "-.")


class Panel(StrEnum):
    """The panels of a picture: one for each way in which mechanisms form attention weights."""

    pairs = "all pairs of tokens"
    pattern = "a pattern or a hash chooses pairs"
    sums = "sums over tokens"
    causal_pairs = "causal, with a cache"
    causal_sums = "causal, with a state of bounded size"
    none = "no attention"


def kind_of(name: str) -> Panel:
    can = EVERYTHING[name].capabilities
    if can.causal:
        return Panel.causal_sums if can.state == "constant" else Panel.causal_pairs
    return Panel[can.weights]


def growth(results: Mapping[str, Result], file: Path, *, what: str, value: Callable[[Point], float]) -> None:
    """Draw one panel per kind of mechanism. Both axes are logarithmic, so slopes are exponents. `what` labels the y axis."""
    kinds = [kind for kind in Panel if any(kind_of(name) == kind and result.points for name, result in results.items())]
    if not kinds:
        return
    rows = -(-len(kinds) // 2)
    figure = Figure(figsize=(13, 4.6 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, kind in zip(panels, kinds, strict=False):
        own = [name for name in results if kind_of(name) == kind]
        for name in (other for other in SHOWN_EVERYWHERE if other in results and other not in own):
            _line(axes, results[name], value, color="0.75", lw=3, zorder=0, label=name)
        for i, name in enumerate(own):
            _line(axes, results[name], value, color=f"C{i % 10}", ls=STYLES[i // 10 % len(STYLES)], marker=".", label=name)
        axes.set(title=kind.value, xscale="log", yscale="log", xlabel="N, tokens", ylabel=what)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2, frameon=False)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    figure.savefig(file)


def seconds(point: Point) -> float:
    return point.s * 1000


def memory(point: Point) -> float:
    return point.peak_bytes / MiB


def ranks(results: Mapping[str, Result], plan: ComparisonPlan, file: Path) -> None:
    """Draw the effective rank of every mechanism: one row each, with a bar for each width."""
    shown = {name: result.ranks for name, result in results.items() if result.ranks}
    if not shown:
        return
    figure = Figure(figsize=(9, 0.5 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for i, width in enumerate(plan.rank_widths):
        values = [next(rank.effective for rank in found if rank.d_head == width) for found in shown.values()]
        axes.plot(values, range(len(shown)), "o", ms=5, color=f"C{i}", label=f"D_k = {width}")
    axes.set_yticks(range(len(shown)), labels=list(shown))
    axes.invert_yaxis()
    axes.set(xlabel=f"effective rank of the N x N matrix, N = {plan.rank_length}", xlim=(0, plan.rank_length))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file)


def _line(axes: Any, result: Result, value: Callable[[Point], float], **style: Any) -> None:
    points = [point for point in result.points if value(point) > 0]
    axes.plot([point.N for point in points], [value(point) for point in points], **style)
