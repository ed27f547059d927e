"""Draws the curves of a training as a picture of two panels."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from models.training.task import Point, Report


class Curve(NamedTuple):
    label: str
    points: Sequence[Point]
    y: Callable[[Point], float]
    x: str = "step"
    colour: int = 0  # of matplotlib's cycle
    dots: bool = True  # evaluations have dots; losses of training batches are thin lines


class Panel(NamedTuple):
    x: str
    y: str
    curves: Sequence[Curve]
    log: bool = True


def draw(panels: Sequence[Panel], file: Path, *, title: str) -> None:
    """Write the panels side by side as PNG."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for label, points, y, x, colour, dots in panel.curves:
            style = {"marker": "o", "ms": 3.5, "lw": 1.6} if dots else {"lw": 0.7, "alpha": 0.6}
            axes.plot([point[x] for point in points], [y(point) for point in points], color=f"C{colour}", label=label, **style)
        axes.set(xlabel=panel.x, ylabel=panel.y, yscale="log" if panel.log and any(curve.points for curve in panel.curves) else "linear")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=130, format="png")


def draw_bits(report: Report, file: Path) -> None:
    """Draw the bits per byte of a decoder against tokens and minutes. `report` is the content of run.json."""

    def curves(x: str) -> list[Curve]:
        return [
            Curve(f"{text} text", report[kind], lambda point: point["bits_per_byte"], x, dots=kind == "evaluations")
            for kind, text in (("losses", "training"), ("evaluations", "held-out"))
        ]

    panels = [Panel("tokens", "bits per byte", curves("tokens")), Panel("minutes of training", "", curves("minutes"))]
    draw(panels, file, title=report["name"])
