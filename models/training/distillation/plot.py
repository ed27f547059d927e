"""Draws the curves of a distillation."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

CURVE = "curve.png"


def plot(report: dict[str, Any], file: Path, *, title: str) -> None:
    """Draw the losses of both phases and the likeness on held-out text into a PNG file. `report` is the content of run.json."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, likeness = figure.subplots(1, 2)
    end_of_transfer = report["config"]["transfer_steps"]
    for phase, colour, points in (
        ("transfer", "C0", [point for point in report["losses"] if point["step"] <= end_of_transfer]),
        ("end to end", "C1", [point for point in report["losses"] if point["step"] > end_of_transfer]),
    ):
        if points:
            loss.plot([point["step"] for point in points], [point["loss"] for point in points], color=colour, lw=1.0, label=phase)
    loss.set(xlabel="step", ylabel="loss of training text", yscale="log")
    steps = [point["step"] for point in report["evaluations"]]
    for name, label in (("cosine", "mean cosine to the teacher"), ("ranks", "rank correlation of pair similarities")):
        likeness.plot(steps, [1 - point[name] for point in report["evaluations"]], marker="o", ms=3.5, label=label)
    likeness.set(xlabel="step", ylabel="held-out text: 1 - likeness", yscale="log")
    for axes in (loss, likeness)[0 if report["losses"] else 1 :]:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=130, format="png")
