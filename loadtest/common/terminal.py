"""Terminal functions for all commands of loadtest: choose parts, show progress, stop on a signal, print tables."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from loadtest.common import report
from service.terminal import console, errors_printed

T = TypeVar("T", bound=StrEnum)


def stdout(*, width: int) -> Console:
    """Return a console for stdout; if stdout is a file, it is `width` characters wide."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def chosen(only: str, parts: type[T]) -> frozenset[T]:
    """Return the parts of a benchmark that the comma-separated list `only` names. Raises typer.BadParameter for an unknown name."""
    words = {word.strip() for word in only.split(",") if word.strip()}
    if not words or words - set(parts):
        raise typer.BadParameter(f"{only!r}: choose parts from {','.join(parts)}", param_hint="--only")
    return frozenset(map(parts, words))


def show(rows: Sequence[report.ReportRow], title: str, *, markdown: bool) -> None:
    """Print the rows to stdout as a table, with `markdown` in Markdown."""
    if markdown:
        print(report.markdown(rows, title))
    else:
        stdout(width=150).print(report.table(rows, title))


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


def run(app: typer.Typer, name: str) -> None:
    """Run the command `app` as a program called `name`. An AttnserveError is printed as one red line."""
    with errors_printed():
        app(prog_name=name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM end the benchmark as Ctrl-C does: by an exception, so that every `with` block stops the processes it has started."""

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
