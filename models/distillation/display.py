"""A run on the terminal, one line with a bar, and its curves as a picture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from models.distillation.loop import Progress
from models.distillation.plan import Plan

LINES = 20  # where there is no terminal: so many lines a run


@contextmanager
def distillation_bar(plan: Plan, console: Console) -> Iterator[Callable[[Progress, float], None]]:
    """Call what it yields after every step, with the tokens a second."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[words]}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=plan.steps, words="")

        def show(progress: Progress, tokens_per_s: float) -> None:
            text = words(progress, plan, tokens_per_s)
            phase = plan.phase(progress.step - 1)
            bar.update(task, completed=progress.step, description=phase, words=text)
            if not console.is_terminal and progress.step % max(1, plan.steps // LINES) == 0:
                console.print(f"{phase} {progress.step / plan.steps:4.0%} {text}", highlight=False, soft_wrap=True)

        yield show


def words(progress: Progress, plan: Plan, tokens_per_s: float) -> str:
    parts = [f"step {progress.step:,}"]
    if progress.losses:
        parts.append(f"loss {progress.losses[-1][1]:.4f}")
    if progress.looks:
        parts.append(f"held-out cosine {progress.looks[-1][1]:.4f}, ranks {progress.looks[-1][2]:.4f}")
    minutes, seconds = divmod(round(progress.seconds * (plan.steps / progress.step - 1)), 60)
    return ", ".join([*parts, f"{tokens_per_s:,.0f} tokens/s", f"{minutes}:{seconds:02} left"])


def plot(report: dict[str, Any], file: Path, *, title: str) -> None:
    """Losses of the two phases, and likeness of held-out text, as PNG. The report is run.json's."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss, likeness = figure.subplots(1, 2)
    turn = report["plan"]["transfer_steps"]
    for phase, colour, points in (
        ("transfer", "C0", [p for p in report["losses"] if p[0] <= turn]),
        ("end to end", "C1", [p for p in report["losses"] if p[0] > turn]),
    ):
        if points:
            loss.plot(*zip(*points, strict=True), color=colour, lw=1.0, label=phase)
    loss.set(xlabel="step", ylabel="loss of training text", yscale="log")
    for column, name in ((1, "mean cosine to the teacher"), (2, "rank correlation of pair similarities")):
        likeness.plot([look[0] for look in report["looks"]], [1 - look[column] for look in report["looks"]], marker="o", ms=3.5, label=name)
    likeness.set(xlabel="step", ylabel="held-out text: 1 - likeness", yscale="log")
    for axes in (loss, likeness)[0 if report["losses"] else 1 :]:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=130, format="png")
