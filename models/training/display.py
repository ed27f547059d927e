"""The progress of a run on the terminal: one line with a bar, figures, tokens per second and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from models.training.trainer import Moment

LINES = 20  # number of progress lines that a training run prints if its output is not a terminal


@contextmanager
def training_bar(name: str, console: Console) -> Iterator[Callable[[Moment], None]]:
    """Yield a function that shows the progress. It is to be called after every step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=1.0, words="")
        printed = 0

        def show(moment: Moment) -> None:
            nonlocal printed
            progress.update(task, completed=moment.share, words=words(moment))
            if not console.is_terminal and moment.share * LINES >= printed + 1:
                printed = int(moment.share * LINES)
                console.print(f"{name} {moment.share:4.0%} {words(moment)}", highlight=False, soft_wrap=True)

        yield show


def words(moment: Moment) -> str:
    minutes, seconds = divmod(round(moment.left_s), 60)
    return ", ".join([f"step {moment.step:,}", *moment.figures, f"{moment.tokens_per_s:,.0f} tokens/s", f"{minutes}:{seconds:02} left"])
