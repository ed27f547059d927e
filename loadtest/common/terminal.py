"""What every command of loadtest does in the terminal: choose parts, show progress, stop on a signal, print tables."""

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
    """The terminal, or a file that is `width` characters wide."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def chosen(only: str, parts: type[T]) -> frozenset[T]:
    """The parts that are named with commas between them. Raises typer.BadParameter for a name that is none."""
    words = {word.strip() for word in only.split(",") if word.strip()}
    if not words or words - set(parts):
        raise typer.BadParameter(f"{only!r}: name parts out of {','.join(parts)}", param_hint="--only")
    return frozenset(map(parts, words))


def show(rows: Sequence[report.Row], title: str, *, markdown: bool) -> None:
    """The table on stdout."""
    if markdown:
        print(report.markdown(rows, title))
    else:
        stdout(width=150).print(report.table(rows, title))


@contextmanager
def progress(steps: int) -> Iterator[Any]:
    """A bar over all steps; call it with the step that begins."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def show(step: str) -> None:
            bar.update(task, description=step, advance=1)
            if not console.is_terminal:
                console.print(step)

        yield show


def run(app: typer.Typer, name: str) -> None:
    """Run a command as a program of its own: an error of ours is one line in red."""
    with errors_printed():
        app(prog_name=name)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the benchmark the way Ctrl-C does: through the blocks that stop what was started."""

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
