"""Draws the training curves of one run or several: bits per byte against tokens and against minutes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

CURVE = "loss.png"


def plot(runs: Mapping[str, dict[str, Any]], file: Path, *, title: str) -> None:
    """Draw each run's `losses` (training text, thin lines) and `evaluations` (held-out text, dots) as PNG. `runs` maps a name to the
    content of run.json.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    against_tokens, against_minutes = figure.subplots(1, 2, sharey=True)
    for i, (name, run) in enumerate(runs.items()):
        for axes, key, unit in ((against_tokens, "tokens", 1e6), (against_minutes, "minutes", 1.0)):
            for curve, style in (("losses", {"lw": 0.7, "alpha": 0.5}), ("evaluations", {"marker": "o", "ms": 3.5, "lw": 1.6})):
                points = run[curve]
                label = f"{name}, {'training' if curve == 'losses' else 'held-out'} text"
                axes.plot([p[key] / unit for p in points], [p["bits_per_byte"] for p in points], color=f"C{i}", label=label, **style)
    against_tokens.set(xlabel="million tokens", ylabel="bits per byte")
    against_minutes.set(xlabel="minutes of training")
    lowest = [p["bits_per_byte"] for run in runs.values() for curve in ("losses", "evaluations") for p in run[curve][-1:]]
    if lowest:
        against_tokens.set_ylim(min(lowest) * 0.9, min(lowest) * 2)  # the high losses of the first steps would hide the rest
    for axes in (against_tokens, against_minutes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    against_minutes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=130, format="png")
