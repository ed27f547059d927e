"""The output of commands: progress, errors, and missing parts of the installation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from service.errors import AttnserveError

console = Console(stderr=True)


class MissingExtra(AttnserveError):
    """A module is missing because an optional extra of the package is not installed."""


def command_app() -> typer.Typer:
    """Create an application for a group of commands. `service/cli.py` mounts it."""
    return typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)


def print_error(message: object) -> None:
    """Print the one-line error of a failed command."""
    console.print(f"[bold red]error[/bold red]: {escape(str(message))}", highlight=False, soft_wrap=True)


@contextmanager
def errors_printed() -> Iterator[None]:
    """Print our own errors and OSErrors (a missing file, a full disk) without a traceback, and exit with status 1."""
    try:
        yield
    except (AttnserveError, OSError) as error:
        print_error(error)
        raise SystemExit(1) from None


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float | None], None]]:
    """Show a line with a spinner, step, bar and elapsed time. Yields `show(step, fraction)`; a `fraction` of None means unknown."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(step: str, fraction: float | None = None) -> None:
            progress.update(task, description=step, total=None if fraction is None else 1.0, completed=fraction or 0.0)
            if not console.is_terminal:
                console.print(step)

        yield show


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """A context manager for imports of an optional extra. If one fails, raises MissingExtra with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(f"this command needs {error.name}, which is not installed: pip install 'attnserve[{extra}]'") from None


def pairs(values: list[str] | None, flag: str) -> dict[str, str]:
    """Parse KEY=VALUE strings into a dictionary. Raises typer.BadParameter for any other string."""
    found = {}
    for value in values or []:
        key, equals, rest = value.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=flag)
        found[key] = rest
    return found
