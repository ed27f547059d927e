"""Adds the measuring commands to `attnserve`. The options of a command are in a module of its own, which is imported when it runs."""

from importlib import import_module

import typer

from service.terminal import command_app, needing

app = command_app()


def _mount(name: str, module: str, summary: str) -> None:
    """Add the command `attnserve NAME`. It passes all its arguments to `app`, the Typer application of `module`."""

    def command(context: typer.Context) -> None:
        with needing("loadtest"):
            measuring = import_module(module)
        measuring.app(context.args, prog_name=f"attnserve {name}")

    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=f"{summary} `attnserve {name} --help` lists what it takes.", context_settings=passed_on)(command)


_mount("bench", "loadtest.bench.command", "Measure the service and what it is compared with, part by part.")
_mount("load", "loadtest.load.command", "Load a running service with Locust and judge it by pass marks.")
_mount("evaluate", "loadtest.evaluate.command", "Measure how well the vectors of bundles find documents.")
_mount("demo", "loadtest.faults.demo", "Kill the generators of a text while it streams: `attnserve demo crash`.")
