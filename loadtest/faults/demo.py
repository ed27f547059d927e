"""`attnserve demo crash`: streams a text, twice kills the generator process that writes it, and shows it beside the undisturbed text."""

import time
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import psutil
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.common.memory import cpu_s
from loadtest.common.terminal import interruptible, stdout
from loadtest.errors import LoadtestError
from loadtest.faults.reading import Reading, compare, difference, read
from loadtest.faults.striking import GENERATOR, service
from service.terminal import command_app, console

app = command_app()

_KILL_AT = (0.25, 0.6)  # a generator is killed each time the client has received one of these shares of the text
_WIDTH = 140  # width of the output in characters if stdout is no terminal


@app.callback()
def demo() -> None:
    """Show on this machine what the service does."""


class Kill(NamedTuple):
    """The kill of a generator: its time (`time.time()`), the process id, and the number of characters that the client had received."""

    at: float
    pid: int
    characters: int


class Killer:
    """Kills the generator that writes the stream each time the client has received the next of `shares`, ascending numbers of
    characters."""

    def __init__(self, generators: Sequence[psutil.Process], shares: Sequence[int]) -> None:
        self.kills: list[Kill] = []
        self._shares, self._before = shares, {process: cpu_s([process]) for process in generators}

    def see(self, reading: Reading) -> None:
        characters = len(text_of(reading))
        if len(self.kills) < len(self._shares) and characters >= self._shares[len(self.kills)]:
            # The writer is the process that has used most CPU time since the stream began: the others are idle.
            writer = max(self._before, key=lambda process: cpu_s([process]) - self._before[process])
            del self._before[writer]
            writer.kill()
            self.kills.append(Kill(time.time(), writer.pid, characters))


def text_of(reading: Reading) -> str:
    return reading.choices[0].text if reading.choices else ""


def pauses(reading: Reading, kills: Sequence[Kill]) -> list[float]:
    """Return, for each kill, the longest gap in seconds between two chunks that ends after this kill and begins before the next kill."""
    return [reading.gap_s(kill.at, until) for kill, until in zip(kills, [*(kill.at for kill in kills[1:]), inf], strict=True)]


def side_by_side(undisturbed: str, killed: str, kills: Sequence[Kill], most_lines: int | None = None) -> Table:
    """Return a table with both texts in two columns, line by line. A line in which a generator was killed is marked. If `most_lines` is
    given, the table has only this many lines, from the end of the text."""
    marks = {killed[: kill.characters].count("\n"): kill.pid for kill in kills}
    left, right = undisturbed.split("\n"), killed.split("\n")
    table = Table(expand=True, show_edge=False)
    for heading in ("undisturbed", "generators killed meanwhile"):
        table.add_column(heading, ratio=1, overflow="fold" if most_lines is None else "ellipsis", no_wrap=most_lines is not None)
    last = max(len(left), len(right)) if most_lines is None else len(right if killed else left)
    for at in range(max(last - (most_lines or last), 0), last):
        line = Text(right[at] if at < len(right) else "")
        if at in marks:
            line.append(f"  <- kill -9 {marks[at]}", "bold red")
        table.add_row(Text(left[at] if at < len(left) else ""), line)
    return table


@app.command()
def crash(
    bundle: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")] = "def mean(values):\n",
    tokens: Annotated[int, typer.Option(min=200, help="Tokens of the text.")] = 600,
    generators: Annotated[
        int, typer.Option(min=2, help="Generators. With two, the text waits at the second kill until a killed one is replaced.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Of the text's random choices.")] = 7,
) -> None:
    """Stream a text, kill the process that generates it twice, and compare it with the undisturbed text. Exits with 1 if they differ."""
    terminal = stdout(width=_WIDTH)
    body = {"prompt": prompt, "max_tokens": tokens, "seed": seed, "temperature": 0.7, "ignore_eos": True}
    terminal.print(f"attnserve starts with {generators} generators. Each is a process of its own, and any of them can write any text.")
    with interruptible(), service(bundle, generators) as running, Live(console=terminal, transient=True) as live:
        terminal.print("One request, undisturbed. Then the same again: twice, the generator that writes the text is killed (kill -9).\n")
        ask = partial(read, running.port, body)
        height = max(terminal.height - 4, 5)

        def shown(left: str, right: str, kills: Sequence[Kill]) -> None:
            if terminal.is_terminal:
                live.update(side_by_side(left, right, kills, height))

        undisturbed = ask("demo-undisturbed", lambda reading: shown(text_of(reading), "", ()))
        if undisturbed.error is not None:
            raise LoadtestError(f"the undisturbed stream failed: {undisturbed.error}")
        wanted = text_of(undisturbed)
        killer = Killer(running.processes(GENERATOR), [round(share * len(wanted)) for share in _KILL_AT])

        def see(reading: Reading) -> None:
            killer.see(reading)
            shown(wanted, text_of(reading), killer.kills)

        killed = ask("demo-killed", see)
    terminal.print(side_by_side(wanted, text_of(killed), killer.kills))
    for kill in killer.kills:
        terminal.print(f"killed generator {kill.pid} when the client had {kill.characters} of {len(wanted)} characters", highlight=False)
    if compare(undisturbed, killed) != "same":
        console.print(f"\n[bold red]The texts differ[/bold red]: {difference(undisturbed, killed)}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    if len(killer.kills) < len(_KILL_AT):
        raise LoadtestError(f"the text was complete after {len(killer.kills)} kills: give more --tokens")
    measured = " and ".join(f"{pause:.2f}" for pause in pauses(killed, killer.kills))
    told = f"{killed.completion_tokens} tokens, {len(killer.kills)} generators killed, pauses of {measured} s."
    terminal.print(f"\nThe same text: {told}", highlight=False)
