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


_mount("bench", "loadtest.bench.encoder", "Start the service and measure it side by side with the bare runtime and with peers.")
_mount("bench-generate", "loadtest.bench.generation.command", "Measure text: the bare step loop, the engine and the service side by side.")
_mount("load", "loadtest.load.command", "Load a running service with Locust and judge it by pass marks.")
_mount("bench-split", "loadtest.bench.split", "Measure profile split beside single.")
_mount("bench-long", "loadtest.bench.long", "Measure an encoder of linear cost beside its teacher on long texts.")
_mount("bench-gpu", "loadtest.bench.gpu", "Measure encoders and decoders on a GPU, after comparing them with the CPU.")
_mount("bench-faults", "loadtest.faults.changes", "Update, scale and kill a cluster of three nodes on this machine under load.")
_mount("bench-states", "loadtest.bench.states", "Measure restoring, forking and storing states beside feeding their prompts again.")
_mount("bench-streams", "loadtest.faults.streams", "Kill processes while eight clients stream, and compare every stream.")
_mount("demo", "loadtest.faults.demo", "Kill the generators of a text while it streams: `attnserve demo crash`.")
