"""A run on the terminal: one line with a bar, the loss, the exact matches and the time that is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.loop import Progress

LINES = 20  # where there is no terminal: so many lines a run


@contextmanager
def training_bar(config: NumberWordsConfig, console: Console) -> Iterator[Callable[[Progress], None]]:
    """Call what it yields after every step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[words]}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(config.name, total=config.max_steps, words="")
        printed = 0

        def show(progress: Progress) -> None:
            nonlocal printed
            bar.update(task, completed=progress.step, words=words(progress, config.max_steps))
            if not console.is_terminal and progress.step * LINES >= (printed + 1) * config.max_steps:
                printed = progress.step * LINES // config.max_steps
                share = progress.step / config.max_steps
                console.print(f"{config.name} {share:4.0%} {words(progress, config.max_steps)}", highlight=False, soft_wrap=True)

        yield show


def words(progress: Progress, max_steps: int) -> str:
    parts = [f"step {progress.step:,}"]
    if progress.losses:
        parts.append(f"loss {progress.losses[-1].value:.4f}")
    if progress.exact:
        parts.append(f"held-out numbers right {progress.exact[-1].value:.1%}")
    minutes, seconds = divmod(round(progress.seconds * (max_steps - progress.step) / progress.step), 60)
    return ", ".join([*parts, f"{minutes}:{seconds:02} left"])
