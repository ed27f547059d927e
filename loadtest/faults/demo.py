"""`attnserve demo crash`: streams a text, twice kills the generator process that writes it, and shows it beside the undisturbed text."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.common.terminal import interruptible, run, stdout
from loadtest.errors import LoadtestError
from loadtest.faults.reading import Reading, compare, difference, read
from loadtest.faults.striking import GENERATOR, Service, service
from service.terminal import command_app, console

app = command_app()

_KILL_AT = (0.25, 0.6)  # a generator is killed each time the client has received one of these shares of the text
_WIDTH = 140  # width of the output in characters if stdout is no terminal


@app.callback()
def demo() -> None:
    """Show on this machine what the service does."""


@dataclass
class Kill:
    """The kill of a generator: its time (`time.time()`), the process id, and the number of characters that the client had received."""

    at: float
    pid: int
    characters: int


@dataclass
class Killer:
    """Kills the generator that writes the stream each time the client has received the next number of characters in `shares`."""

    generators: list[psutil.Process]
    shares: list[int]  # ascending numbers of characters
    kills: list[Kill] = field(default_factory=list)
    tell: Callable[[Kill], object] = lambda kill: None

    def __post_init__(self) -> None:
        self._before = {process: _cpu_s(process) for process in self.generators}

    def see(self, reading: Reading) -> None:
        """Kill the generator that writes the text if `reading` has reached the next number of characters in `shares`."""
        characters = len(reading.choices[0].text) if reading.choices else 0
        if len(self.kills) < len(self.shares) and characters >= self.shares[len(self.kills)]:
            # The writer is the process that has used most CPU time since the stream began: the others are idle.
            writer = max(self._before, key=lambda process: _cpu_s(process) - self._before[process])
            del self._before[writer]
            writer.send_signal(signal.SIGKILL)
            self.kills.append(Kill(time.time(), writer.pid, characters))
            self.tell(self.kills[-1])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def pauses(reading: Reading, kills: Sequence[Kill]) -> list[float]:
    """Return, for each kill, the longest gap in seconds between two chunks that ends after this kill and begins before the next kill."""
    ends = [*(kill.at for kill in kills[1:]), float("inf")]
    return [
        max((after - before for before, after in pairwise(reading.times) if after > kill.at and before < end), default=0.0)
        for kill, end in zip(kills, ends, strict=True)
    ]


def side_by_side(undisturbed: str, killed: str, kills: Sequence[Kill], most_lines: int | None = None) -> Table:
    """Return a table with both texts in two columns, line by line. A line in which a generator was killed is marked.

    If `most_lines` is given, the table has only this many lines, from the end of the text.
    """
    marks = {killed[: kill.characters].count("\n"): kill.pid for kill in kills}
    left, right = undisturbed.split("\n"), killed.split("\n")
    table = Table(expand=True, show_edge=False)
    for heading in ("undisturbed", "generators killed meanwhile"):
        table.add_column(heading, ratio=1, overflow="fold" if most_lines is None else "ellipsis", no_wrap=most_lines is not None)
    lines = max(len(left), len(right))
    first = 0 if most_lines is None else max((len(right) if killed else len(left)) - most_lines, 0)
    for at in range(first, lines if most_lines is None else min(first + most_lines, lines)):
        line = Text(right[at] if at < len(right) else "")
        if at in marks:
            line.append(f"  <- kill -9 {marks[at]}", "bold red")
        table.add_row(Text(left[at] if at < len(left) else ""), line)
    return table


@dataclass
class Shown:
    """Shows both texts in columns while they are streamed. If stdout is no terminal (`live` is None), it shows nothing."""

    terminal: Console
    undisturbed: str = ""
    killed: str = ""
    kills: Sequence[Kill] = ()
    live: Live | None = None

    def refresh(self) -> None:
        if self.live is not None:
            self.live.update(side_by_side(self.undisturbed, self.killed, self.kills, max(self.terminal.height - 4, 5)))

    def first(self, reading: Reading) -> None:
        self.undisturbed = reading.choices[0].text if reading.choices else ""
        self.refresh()

    def second(self, reading: Reading) -> None:
        self.killed = reading.choices[0].text if reading.choices else ""
        self.refresh()


def show(running: Service, body: dict[str, Any], terminal: Console) -> tuple[Reading, Reading, list[Kill]]:
    """Stream the text undisturbed, then again while its generators are killed. Return both streams and the kills."""
    shown = Shown(terminal)
    terminal.print("One request, undisturbed. Then the same again: twice, the generator that writes the text is killed (kill -9).\n")
    with Live(console=terminal, transient=True, auto_refresh=True) as live:
        shown.live = live if terminal.is_terminal else None
        undisturbed = read(running.port, body, "demo-undisturbed", shown.first)
        if undisturbed.error is not None:
            raise LoadtestError(f"the undisturbed stream failed: {undisturbed.error}")
        whole = len(undisturbed.choices[0].text)
        killer = Killer(running.processes(GENERATOR), [round(share * whole) for share in _KILL_AT])
        if shown.live is None:
            killer.tell = lambda kill: terminal.print(
                f"killed generator {kill.pid} when the client had {kill.characters} of {whole} characters"
            )
        shown.kills = killer.kills

        def see(reading: Reading) -> None:
            killer.see(reading)
            shown.second(reading)

        killed = read(running.port, body, "demo-killed", see)
    return undisturbed, killed, killer.kills


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
    with interruptible(), service(bundle, generators) as running:
        undisturbed, killed, kills = show(running, body, terminal)
    text = killed.choices[0].text if killed.choices else ""
    terminal.print(side_by_side(undisturbed.choices[0].text, text, kills))
    if compare(undisturbed, killed) != "same":
        console.print(f"\n[bold red]The texts differ[/bold red]: {difference(undisturbed, killed)}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    if len(kills) < len(_KILL_AT):
        raise LoadtestError(f"the text was complete after {len(kills)} kills: give more --tokens")
    measured = " and ".join(f"{pause:.2f}" for pause in pauses(killed, kills))
    terminal.print(
        f"\nThe same text: {killed.completion_tokens} tokens, {len(kills)} generators killed, pauses of {measured} s.", highlight=False
    )


if __name__ == "__main__":
    run(app, "demo")
