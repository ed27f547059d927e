"""The command `attnserve`. `serve` and `config` are defined here; the other commands are imported from their packages when called."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from service import settings as known
from service.settings import Settings
from service.terminal import console, errors_printed, pairs, print_error, progress_bar

# Command -> the module whose `app` defines it, in the order of `attnserve --help`.
COMMANDS = {
    "export": "export.commands",
    "inspect": "export.commands",
    "fetch": "service.deployment.commands",
    "serve": "service.cli",
    "config": "service.cli",
    "key": "service.deployment.commands",
    "upgrade": "service.deployment.commands",
    "states": "service.states.commands",
    "attention": "export.commands",
    "compare": "export.commands",
    **dict.fromkeys(("bench", "load", "evaluate", "demo"), "loadtest.commands"),
}


class Commands(TyperGroup):
    """The service's own commands, and commands of other packages. The other packages are imported when their commands are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        mounted = typer.main.get_group(import_module(COMMANDS[cmd_name]).app)
        return mounted.commands.get(cmd_name)


app = typer.Typer(
    name="attnserve", cls=Commands, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False
)


def _flag(setting: str, *names: str, repeated: bool = False, **options: Any) -> Any:
    """Return the command-line option for a setting. Its help text is the setting's description."""
    field = Settings.model_fields[setting]
    if isinstance(field.default, str | int) and not isinstance(field.default, bool):
        options = {"show_default": str(field.default), **options}
    return typer.Option(*names, help=f"{field.description}{' May be given several times.' if repeated else ''}", **options)


# Flags of both `serve` and `config`.
BundleFlag = Annotated[list[Path] | None, _flag("bundles", "--bundle", repeated=True)]
ConfigFlag = Annotated[Path | None, typer.Option(help="YAML file of settings.")]
ProviderFlag = Annotated[Literal["auto", "cpu", "cuda"] | None, _flag("provider")]
EncodersFlag = Annotated[int | None, _flag("encoders")]
GeneratorsFlag = Annotated[int | None, _flag("generators")]
ThreadsFlag = Annotated[int | None, _flag("threads")]
_LIMITING = ("default_max", "max_", "request_timeout", "slot")  # how the names of limits begin
SetFlag = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any setting of docs/settings.md. May be given several times.")]
_LIMITS = [name for name, field in Settings.model_fields.items() if name.startswith(_LIMITING) and field.default is not None]
LIMITS = f"Limits, for `--set`: {', '.join(f'{name}={known.default_of(name)}' for name in _LIMITS)}."


def _show_version(asked: bool) -> None:
    if asked:
        print(f"attnserve {version('attnserve')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Serve attention models over HTTP: embeddings, rerank scores and generated text, from ONNX Runtime under Ray Serve."""


@app.command(epilog=LIMITS)
def serve(
    ctx: typer.Context,
    bundles: BundleFlag = None,
    config: ConfigFlag = None,
    host: Annotated[str | None, _flag("host")] = None,
    port: Annotated[int | None, _flag("port")] = None,
    aliases: Annotated[list[str] | None, _flag("aliases", "--alias", repeated=True)] = None,
    api_keys: Annotated[list[str] | None, _flag("api_keys", "--api-key", repeated=True)] = None,
    api_keys_file: Annotated[Path | None, _flag("api_keys_file")] = None,
    cors_origins: Annotated[list[str] | None, _flag("cors_origins", "--cors-origin", repeated=True)] = None,
    profile: Annotated[str | None, _flag("profile")] = None,
    encoders: EncodersFlag = None,
    generators: GeneratorsFlag = None,
    provider: ProviderFlag = None,
    threads: ThreadsFlag = None,
    lean: Annotated[bool | None, _flag("lean", "--lean")] = None,
    access_log: Annotated[bool | None, _flag("access_log", "--access-log")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    console: Annotated[bool | None, _flag("console", "--console/--no-console")] = None,
    development: Annotated[bool | None, _flag("development", "--development")] = None,
    set_: SetFlag = None,
) -> None:
    """Serve bundles over HTTP until SIGTERM or Ctrl-C. Accepted requests are finished first; a second signal stops at once.

    Each setting can also be the environment variable `ATTNSERVE_NAME` or a key of the YAML file; flags take precedence over both.
    """
    flags: dict[str, Any] = {"aliases": pairs(aliases, "--alias")} if aliases else {}
    if cors_origins and len(cors_origins) == 1:
        flags["cors_origins"] = cors_origins[0]  # a single value may itself be a list separated by commas
    settings = _settings({**_given(ctx), **flags, **pairs(set_, "--set")}, config)
    if settings.api_keys_file is not None:
        from service.http.keys import read

        read(settings.api_keys_file)  # reports errors in the file of API keys now, not later in a replica
    _run(settings)


@app.command("config", epilog=LIMITS)
def serve_config(
    ctx: typer.Context,
    bundles: BundleFlag = None,
    config: ConfigFlag = None,
    host: Annotated[str, _flag("host", show_default=True)] = "0.0.0.0",
    encoders: EncodersFlag = None,
    generators: GeneratorsFlag = None,
    max_gateways: Annotated[int | None, _flag("max_gateways")] = None,
    max_encoders: Annotated[int | None, _flag("max_encoders")] = None,
    max_generators: Annotated[int | None, _flag("max_generators")] = None,
    provider: ProviderFlag = None,
    threads: ThreadsFlag = None,
    set_: SetFlag = None,
) -> None:
    """Print profile split as Ray Serve's configuration, for `serve deploy` or KubeRay's `serveConfigV2`.

    Bundles, and the file of API keys if there is one, must be at the same path on every node. Other API keys come from the environment
    variable ATTNSERVE_API_KEYS of each node.
    """
    from service.deployment.config import render

    print(render(_settings({**_given(ctx), "profile": "split", **pairs(set_, "--set")}, config)), end="")


def _given(ctx: typer.Context) -> dict[str, Any]:
    """Return the settings whose flags were given. A command's parameters have the names of settings."""
    return {name: value for name, value in ctx.params.items() if name in Settings.model_fields and value not in (None, (), [])}


def _settings(flags: dict[str, Any], config: Path | None) -> Settings:
    """Load the settings from all sources. Checks that bundles are intact, and that aliases and default models name served models."""
    from export.contract import verify

    settings = known.load(flags, config)
    if not settings.bundles:
        raise typer.BadParameter("there is nothing to serve: name a bundle with --bundle (`attnserve export` makes one)")
    known.check_names(settings, [verify(path).name for path in settings.bundles])
    return settings


def _run(settings: Settings) -> None:
    """Start the service, wait for a signal, and stop it. A service that fails ends the process with status 1 and prints the reason."""
    from service.deployment.deployer import LOG_FILE
    from service.deployment.flags import prepare
    from service.deployment.front import Front, listen
    from service.deployment.running import Service, run_directory
    from service.deployment.watch import Watch, adopt
    from service.runtime.onnx import check_install
    from service.states import opening
    from service.telemetry.logs import Follower, to_file

    check_install(settings.provider)
    opening.check(settings)
    with listen(settings.host, settings.port) as listener, run_directory() as run:
        adopt()
        prepare(settings)
        to_file(None, settings.log_level)

        def end(reason: str) -> None:
            service.kill()
            with suppress(BaseException):  # rich raises SystemExit if nobody reads stderr, which would end this thread only
                console.show_cursor(True)
                print_error(reason)
            os._exit(1)

        front = Front(settings, run, listener)
        watch = Watch(run, front, end)
        service = Service(settings, run, front, watch)
        signals = Signals(at_once=service.kill)
        follower = Follower(run / LOG_FILE)
        try:
            with progress_bar() as show:
                service.start(lambda step: show(step, None))
            signals.started = True
            console.print(f"[green]ready[/green] at {service.url}, API at {service.url}/docs; Ctrl-C stops")
            signals.asked.wait()
            console.print("stopping: accepted requests are finished first, a second signal ends at once")
        finally:
            unfinished = service.stop()
            follower.stop()
    if unfinished:
        console.print(f"[yellow]{unfinished} requests could not be finished within {settings.drain_timeout_s} s[/yellow]")
        raise typer.Exit(1)


class Signals:
    """Handles SIGTERM, SIGHUP and Ctrl-C. The first signal stops a running service. A second signal, or a signal during the start, ends the
    process.
    """

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.asked = threading.Event()
        self.started = False
        self._at_once = at_once
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._received)

    def _received(self, number: int, frame: object) -> None:
        if self.started and not self.asked.is_set():
            self.asked.set()
            return
        self._at_once()
        console.show_cursor(True)
        console.print("stopped at once" if self.started else "stopped before it was ready")
        os._exit(128 + number)


def main() -> None:
    """Run the command line; the entry point of `attnserve`."""
    # A file that is opened later must not get the number of a standard stream that is closed: children would have it as that stream.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))  # noqa: PTH123, SIM115
    with errors_printed():
        app()


if __name__ == "__main__":
    main()
