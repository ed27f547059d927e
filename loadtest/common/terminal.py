"""Terminal functions for all commands of loadtest: show progress, stop on a signal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from service.terminal import console


def stdout(*, width: int) -> Console:
    """Return a console for stdout; if stdout is a file, it is `width` characters wide."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


@contextmanager
def progress(steps: int) -> Iterator[Any]:
    """Show a progress bar for `steps` steps. Yields a function to call with the name of each step as it begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def show(step: str) -> None:
            bar.update(task, description=step, advance=1)
            if not console.is_terminal:
                console.print(step)

        yield show


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM end the benchmark as Ctrl-C does: by an exception, so that every `with` block stops the processes it has started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
