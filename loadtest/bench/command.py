"""`attnserve bench PART`: measures one of the parts in `parts.py`; see loadtest/README.md."""

import os
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from loadtest.bench.parts import PARTS, Part
from loadtest.common import benchmark
from loadtest.common.benchmark import Plan
from loadtest.common.terminal import interruptible
from service.terminal import command_app, needing, pairs

app = command_app()


def listed() -> str:
    """Return a line for each part, with its options for `--set`."""
    lines = []
    for name, part in PARTS.items():
        options = ", ".join(f"{option}={value}" for option, value in part.options.items())
        lines.append(f"{name:10} {part.about}{f' --set {options}' if options else ''}")
    return "\n".join(lines)


@app.command(epilog="Parts: " + "  ".join(f"{name}: {part.about}" for name, part in PARTS.items()))
def bench(
    part: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}.")] = "",
    bundle: Annotated[list[Path] | None, typer.Option(help="Bundle to measure. Can be repeated.", show_default="by part")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Figures are medians over them.", show_default="by part")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Length of one measurement.", show_default="by part")] = None,
    only: Annotated[str, typer.Option(help="Steps to measure, with commas.", show_default="all")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of a part's option. Can be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("out/bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the parts with their options.")] = False,
) -> None:
    """Measure the service and what it is compared with, in turns on this machine.

    Starts and stops everything itself. Exits with 1 if a required value is missed. Keep the machine idle otherwise.
    """
    if list_ or not part:
        print(listed())
        return
    if part not in PARTS:
        raise typer.BadParameter(f"{part!r}: choose from {', '.join(PARTS)}", param_hint="PART")
    chosen = PARTS[part]
    for name in [name for name in os.environ if name.startswith("ATTNSERVE_")]:
        del os.environ[name]  # a service that is measured has its defaults
    steps = [step.strip() for step in only.split(",") if step.strip()]
    with ExitStack() as stack, interruptible():
        plan = Plan(
            bundles=bundle or [Path(each) for each in chosen.bundles],
            seconds=seconds or chosen.seconds,
            options=options_of(chosen, set_ or []),
            folder=Path(stack.enter_context(TemporaryDirectory(prefix="bench-"))),
            stack=stack,
        )
        with needing("export"):
            made = import_module(chosen.module).benchmark(plan)
        benchmark.show(part, plan, made, rounds or chosen.rounds, steps, out, markdown=markdown)


def options_of(part: Part, given: list[str]) -> dict[str, str]:
    """Return the part's options with the values that were given. Raises typer.BadParameter for another option."""
    found = pairs(given, "--set")
    if unknown := set(found) - set(part.options):
        raise typer.BadParameter(f"{', '.join(unknown)}: this part takes {', '.join(part.options) or 'no options'}", param_hint="--set")
    return {**part.options, **found}
