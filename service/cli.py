"""The command `attnserve`: train a decoder, export a checkpoint, look at a bundle, serve bundles, measure."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

app = typer.Typer(name="attnserve", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
console = Console(stderr=True)


class Precision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class Provider(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def root() -> None:
    """Serve attention models over HTTP: embeddings and rerank scores from ONNX encoders under Ray Serve."""


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json, model.safetensors and tokenizer.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Bundle directory to write; an older bundle there is replaced at the end.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name that clients send as `model`; the directory's name by default.")] = None,
    precision: Annotated[Precision, typer.Option(help="fp16 is for GPUs; int8 of an encoder must reach --min-cosine.")] = Precision.fp32,
    attention: Annotated[str, typer.Option(help="softmax keeps the checkpoint's attention; linear swaps it, untrained.")] = "softmax",
    min_cosine: Annotated[float, typer.Option(min=0, max=1, help="int8 encoders: lowest cosine to fp32 on the golden texts.")] = 0.99,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Decoders: text to state the bits per byte of, a file or a folder that `models.training.collect` wrote."),
    ] = None,
) -> None:
    """Write a checkpoint as a bundle: ONNX graph, tokenizer, manifest, golden vectors, all checked against torch."""
    with needing("export"):
        from export.bundle import export_bundle
        from export.inspection import bits_per_byte
    with progress_bar() as show:
        manifest = export_bundle(
            checkpoint,
            out,
            name=name or out.resolve().name,
            precision=precision.value,
            attention=attention,
            min_cosine=min_cosine,
            held_out=held_out,
            progress=show,
        )
    console.print(f"[green]{out}[/green]: {manifest.kind}, {manifest.precision}, fingerprint {manifest.fingerprint[:12]}")
    if (bits := bits_per_byte(manifest)) is not None:
        console.print(f"Bits per byte: {bits}", highlight=False, soft_wrap=True)
    console.print(f"Serve it: [bold]attnserve serve --bundle {out}[/bold]")


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file; see models/training/configs.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder that `python -m models.training.collect` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write; a run begun there goes on.", show_default=False)],
) -> None:
    """Train a decoder and write it as a checkpoint with its model card. After Ctrl-C or a kill, the same command goes on where it was."""
    with needing("train"):
        from models.training.run import run
    if not run(config, data, out, console):
        raise typer.Exit(130)
    console.print(f"Export it: [bold]attnserve export --checkpoint {out} --out bundles/{out.resolve().name}[/bold]")


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.", show_default=False)],
    graph: Annotated[bool, typer.Option("--graph", help="Draw the histogram of operators.")] = False,
) -> None:
    """What a bundle is: sizes, limits, parity, fingerprint. Every byte is checked against the manifest."""
    from export.inspection import render

    Console().print(render(bundle, graph=graph))


@app.command()
def serve(
    bundle: Annotated[list[Path] | None, typer.Option(help="Bundle to serve; may be given several times.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8000")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="ALIAS=NAME, another name of a model; may be given several times.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key to accept as `Authorization: Bearer`; better in ATTNSERVE_API_KEYS.")
    ] = None,
    provider: Annotated[Provider | None, typer.Option(help="Where graphs run.", show_default="auto")] = None,
    threads: Annotated[int | None, typer.Option(help="Runtime threads.", show_default="all CPUs")] = None,
    lean: Annotated[bool | None, typer.Option("--lean", help="Without HAProxy: less memory, one replica's own port.")] = None,
    access_log: Annotated[bool | None, typer.Option("--access-log", help="Log every request.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any other setting; may be given several times.")] = None,
) -> None:
    """Serve bundles over HTTP until SIGTERM or Ctrl-C; accepted requests are finished first, a second signal ends at once.

    Each setting can also be `ATTNSERVE_NAME` in the environment or a key of the YAML file; flags win over both.
    """
    from export.contract import verify
    from service import settings as known

    flags: dict[str, Any] = {
        "bundles": bundle or None,
        "aliases": pairs(alias, "--alias") if alias else None,
        "host": host,
        "port": port,
        "api_keys": api_key or None,
        "provider": provider.value if provider else None,
        "threads": threads,
        "lean": lean,
        "access_log": access_log,
        "log_level": log_level,
        **pairs(set_, "--set"),
    }
    settings = known.load({name: value for name, value in flags.items() if value is not None}, config)
    if not settings.bundles:
        raise typer.BadParameter("there is nothing to serve: name a bundle with --bundle (`attnserve export` makes one)")
    for path in settings.bundles:
        verify(path)
    _run(settings)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Start the service and measure it side by side with the bare runtime and with peers. `attnserve bench --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.bench import app as bench_app
    bench_app(context.args, prog_name="attnserve bench")


@app.command("bench-generate", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench_generate(context: typer.Context) -> None:
    """Measure text: the bare step loop, the engine and the service side by side. `attnserve bench-generate --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.bench_generate import app as bench_app
    bench_app(context.args, prog_name="attnserve bench-generate")


def _run(settings: Any) -> None:
    """Start, wait for a signal, stop."""
    from service.deployment import LOG_FILE, Service, check_port, prepare, run_directory
    from service.logs import Follower
    from service.runtime import one_runtime

    one_runtime()
    check_port(settings.host, settings.port)
    with run_directory() as run:
        prepare(settings, run)
        service = Service(settings, run)
        signals = Signals(at_once=service.kill)
        follower = Follower(run / LOG_FILE)
        try:
            with progress_bar() as show:

                def step(name: str) -> None:
                    signals.install()  # Ray puts handlers of its own in place of ours as it starts
                    show(name, None)

                service.start(step)
            signals.install()
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
    """SIGTERM and Ctrl-C: the first asks a service that runs to stop; the second, or one before it runs, ends at once."""

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.asked = threading.Event()
        self.started = False
        self._at_once = at_once
        self.install()

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: object) -> None:
        if self.started and not self.asked.is_set():
            self.asked.set()
            return
        self._at_once()
        console.show_cursor(True)
        console.print("stopped at once" if self.started else "stopped before it was ready")
        os._exit(128 + number)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float | None], None]]:
    """A line with a spinner, a step's name, a bar and the time so far. Call it with (step, fraction done or None)."""
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
    """Imports that only an extra of the package brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(f"this command needs {error.name}, which is not installed: pip install 'attnserve[{extra}]'") from None


class MissingExtra(RuntimeError):
    """The install lacks what a command needs."""


def pairs(values: list[str] | None, flag: str) -> dict[str, str]:
    """KEY=VALUE strings as a dictionary."""
    found = {}
    for value in values or []:
        key, equals, rest = value.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=flag)
        found[key] = rest
    return found


def main() -> None:
    """Entry point. An error class of ours carries a sentence for the user: it is shown in red, without a traceback."""
    try:
        app()
    except Exception as error:
        ours = type(error).__module__.partition(".")[0] in ("service", "export", "models", "loadtest")
        if not ours and not isinstance(error, FileNotFoundError | PermissionError):
            raise
        console.print(f"[bold red]error[/bold red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
