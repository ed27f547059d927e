"""The command `attnserve`: train a decoder, distil an encoder, export a checkpoint, look at a bundle, serve bundles, measure."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from attnserve.errors import AttnserveError

app = typer.Typer(name="attnserve", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
console = Console(stderr=True)
PROGRESS_EVERY_S = 5.0  # lines of a transfer's progress in a log


class Precision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class Provider(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Runtime(StrEnum):
    onnxruntime = "onnxruntime"
    torch = "torch"


# Flags of the commands that read settings.
BundleFlag = Annotated[list[Path] | None, typer.Option("--bundle", help="Bundle to serve; may be given several times.")]
ConfigFlag = Annotated[Path | None, typer.Option(help="YAML file of settings.")]
ProviderFlag = Annotated[
    Provider | None, typer.Option(help="Where encoders and decoders compute; encoder-decoders use the CPU.", show_default="auto")
]
EncodersFlag = Annotated[int | None, typer.Option(help="Replicas for vectors and scores, in profile split.", show_default="1")]
GeneratorsFlag = Annotated[int | None, typer.Option(help="Replicas for texts, in profile split.", show_default="1")]
SetFlag = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any other setting; may be given several times.")]


@app.callback()
def root() -> None:
    """Serve attention models over HTTP: embeddings, rerank scores and generated text, from ONNX Runtime under Ray Serve."""


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Bundle directory to write; an older bundle there is replaced at the end.", show_default=False)],
    checkpoint: Annotated[Path | None, typer.Option(help="Folder with config.json, model.safetensors and tokenizer.json.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="In its place: a file that describes an encoder of any attention; see models/configs.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name that clients send as `model`; the directory's name by default.")] = None,
    precision: Annotated[Precision, typer.Option(help="fp16 is for GPUs; int8 of an encoder must reach --min-cosine.")] = Precision.fp32,
    attention: Annotated[str, typer.Option(help="softmax keeps the checkpoint's attention; linear swaps it, untrained.")] = "softmax",
    min_cosine: Annotated[float, typer.Option(min=0.5, max=1, help="int8 encoders: lowest cosine to fp32 on the golden texts.")] = 0.99,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Decoders: text to state the bits per byte of, a file or a folder that `models.training.collect` wrote."),
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Add the graph that `attnserve attention` and /v1/attention look into.")] = False,
) -> None:
    """Write a checkpoint as a bundle: ONNX graph, tokenizer, manifest, golden vectors, all checked against torch."""
    if (source := checkpoint or config) is None or (checkpoint and config):
        raise typer.BadParameter("give a folder of weights with --checkpoint, or a description with --config, one of the two")
    with needing("export"):
        from export.bundle import export_bundle, export_file
        from export.inspection import bits_per_byte
    if checkpoint is not None:
        from export.contract import TOKENIZER
        from service.tokenization.tokenizer_file import check_form

        check_form(checkpoint / TOKENIZER)
    with progress_bar() as show:
        manifest = (export_file if config else export_bundle)(
            source,
            out,
            name=name or out.resolve().name,
            precision=precision.value,
            attention=attention,
            min_cosine=min_cosine,
            held_out=held_out,
            maps=maps,
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
def train_number_words(
    config: Annotated[Path, typer.Option(help="YAML file; see models/training/configs/number-words*.yaml.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write; a run begun there goes on.", show_default=False)],
) -> None:
    """Train an encoder-decoder from number words to digits. After Ctrl-C or a kill, the same command goes on where it was."""
    with needing("train"):
        from models.training.number_words.run import run
    if not run(config, out, console):
        raise typer.Exit(130)
    console.print(f"Export it: [bold]attnserve export --checkpoint {out} --out bundles/{out.resolve().name}[/bold]")


@app.command()
def distill(
    teacher: Annotated[Path, typer.Option(help="Checkpoint folder of an encoder with softmax attention.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder that `python -m models.distillation.collect` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write; a run begun there goes on.", show_default=False)],
    attention: Annotated[str, typer.Option(help="What takes the place of the softmax, a name in LAYERS.")] = "hybrid",
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the layer, as block=64; may be given several times.")] = None,
    positions: Annotated[int, typer.Option(min=2, help="Longest input of the student, in tokens.")] = 8_192,
    transfer_steps: Annotated[int, typer.Option(min=0, help="Steps in which layers are taught one by one.")] = 400,
    end_to_end_steps: Annotated[int, typer.Option(min=0, help="Steps after them, in which the whole is taught.")] = 400,
    tokens: Annotated[int, typer.Option(min=1, help="Of a step.")] = 4_096,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of a text to train on: the hybrid learns nothing up to 2 blocks.")] = 129,
    longest: Annotated[int, typer.Option(min=1, help="Tokens at which texts are cut.")] = 1_024,
    blocks_rate: Annotated[float, typer.Option(min=0, help="Learning rate of the teacher's own weights in the second phase.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Teach an encoder another attention, so that it answers as it did, and write the difference. The same command goes on after a kill."""
    with needing("train"):
        from models.distillation.plan import Plan
        from models.distillation.run import run
    options = {key: int(value) if value.lstrip("-").isdigit() else value for key, value in pairs(option, "--option").items()}
    try:
        plan = Plan(
            attention=attention,
            options=options,
            n_positions=positions,
            transfer_steps=transfer_steps,
            end_to_end_steps=end_to_end_steps,
            tokens=tokens,
            shortest=shortest,
            longest=longest,
            end_rate=blocks_rate,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not run(teacher, data, out, plan, console):
        raise typer.Exit(130)


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.", show_default=False)],
    graph: Annotated[bool, typer.Option("--graph", help="Draw the histogram of operators.")] = False,
) -> None:
    """What a bundle is: sizes, limits, parity, fingerprint. Every byte is checked against the manifest."""
    from export.inspection import render

    Console().print(render(bundle, graph=graph))


@app.command()
def fetch(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            envvar="BUNDLE_URLS",
            help="[NAME=]URL[#sha256:FINGERPRINT] of a bundle's folder: s3://, gs://, az://, https://, http://, file:// or a path.",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option(help="Folder; each bundle becomes a folder in it.", show_default=False)],
    max_gib: Annotated[float, typer.Option(min=0.001, help="Largest bundle.")] = 20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte before a transfer is retried.")] = 30,
) -> None:
    """Download bundles from an object store, a web server or a volume. A bundle appears in the folder when all its hashes are right.

    Files that are already there are not fetched again, and a stopped transfer is continued. Credentials come from the environment
    (`AWS_*`, `GOOGLE_*`, `AZURE_*`, roles of pods and machines); `AWS_ENDPOINT_URL` names an S3 server of your own.
    """
    from service.deployment import fetching

    with needing("fetch"), transfer_bar() as (show, say):
        for each in fetching.fetch(urls, to, fetching.Bounds(int(max_gib * 2**30), timeout), show, say):
            megabytes = each.received_bytes / 1e6
            rate = f"{megabytes:,.1f} MB in {each.seconds:.1f} s, {megabytes / max(each.seconds, 1e-3):,.1f} MB/s"
            how = rate if each.received_bytes else "already there"
            say(f"{each.folder}: {how}, fingerprint {each.manifest.fingerprint}")
            if not each.pinned:
                say(f"  not pinned: add #sha256:{each.manifest.fingerprint} to the URL to refuse any other bundle")


@app.command()
def serve(
    bundle: BundleFlag = None,
    config: ConfigFlag = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8000")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="ALIAS=NAME, another name of a model; may be given several times.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key to accept as `Authorization: Bearer`; better in ATTNSERVE_API_KEYS.")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="JSON file of keys, by their hashes, with tenants and limits; see `attnserve key`.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call from a browser, as https://app.example; * is all. May be given several times."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="single: one process; split: a gateway before pools of replicas.", show_default="single")
    ] = None,
    encoders: EncodersFlag = None,
    generators: GeneratorsFlag = None,
    provider: ProviderFlag = None,
    threads: Annotated[int | None, typer.Option(help="Runtime threads, of each replica.", show_default="all CPUs, shared out")] = None,
    lean: Annotated[bool | None, typer.Option("--lean", help="Without HAProxy: clients talk to the replica's own server.")] = None,
    access_log: Annotated[bool | None, typer.Option("--access-log", help="Log every request.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
    set_: SetFlag = None,
) -> None:
    """Serve bundles over HTTP until SIGTERM or Ctrl-C; accepted requests are finished first, a second signal ends at once.

    Each setting can also be `ATTNSERVE_NAME` in the environment or a key of the YAML file; flags win over both.
    """
    flags: dict[str, Any] = {
        "bundles": bundle or None,
        "aliases": pairs(alias, "--alias") if alias else None,
        "host": host,
        "port": port,
        "api_keys": api_key or None,
        "api_keys_file": api_keys_file,
        "cors_origins": cors_origin[0] if cors_origin and len(cors_origin) == 1 else cors_origin or None,  # one may be a list with commas
        "profile": profile,
        "encoders": encoders,
        "generators": generators,
        "provider": provider.value if provider else None,
        "threads": threads,
        "lean": lean,
        "access_log": access_log,
        "log_level": log_level,
        **pairs(set_, "--set"),
    }
    settings = _settings(flags, config)
    if settings.api_keys_file is not None:
        from service.http.keys import read

        read(settings.api_keys_file)  # here rather than in a replica, whose errors come late
    _run(settings)


@app.command("config")
def serve_config(
    bundle: BundleFlag = None,
    config: ConfigFlag = None,
    host: Annotated[str, typer.Option(help="Address to listen on, on every node.")] = "0.0.0.0",
    encoders: EncodersFlag = None,
    generators: GeneratorsFlag = None,
    max_gateways: Annotated[int | None, typer.Option(help="Scale gateways by processor time, up to so many.")] = None,
    max_encoders: Annotated[int | None, typer.Option(help="Scale encoders by tokens asked for, up to so many.")] = None,
    max_generators: Annotated[int | None, typer.Option(help="Scale generators by slots asked for, up to so many.")] = None,
    provider: ProviderFlag = None,
    threads: Annotated[int | None, typer.Option(help="Runtime threads of each replica.", show_default="this machine's, shared out")] = None,
    set_: SetFlag = None,
) -> None:
    """Print profile split as Ray Serve's configuration, for `serve deploy` or KubeRay's `serveConfigV2`.

    Bundles must be at the same place on every node, and so the file of API keys; other keys in its ATTNSERVE_API_KEYS.
    """
    flags: dict[str, Any] = {
        "bundles": bundle or None,
        "host": host,
        "profile": "split",
        "encoders": encoders,
        "generators": generators,
        "max_gateways": max_gateways,
        "max_encoders": max_encoders,
        "max_generators": max_generators,
        "provider": provider.value if provider else None,
        "threads": threads,
        **pairs(set_, "--set"),
    }
    settings = _settings(flags, config)
    from service.deployment.config import render

    print(render(settings), end="")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="What logs and traces call it.", show_default=False)],
    tenant: Annotated[str, typer.Option(help="The key's tenant. Limits, shares and usage belong to the tenant.", show_default=False)],
    file: Annotated[Path | None, typer.Option(help="Put the entry into this file of keys; it is made if there is none.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Limit of the tenant on each gateway.", show_default="none")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="The same of tokens read and written.", show_default="none")] = None,
    streams: Annotated[int | None, typer.Option(help="Streams at the same time.", show_default="none")] = None,
) -> None:
    """Make an API key: print it, this once, and its entry for `--api-keys-file`, which holds the key's hash."""
    from service.http import keys

    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute, "streams": streams}
    made, entry = keys.make(name, tenant, limits)
    if file is not None:
        keys.add(entry, file)
    print(made)
    if file is None:
        print(keys.written(entry))
        console.print("The first line is the key: it is not shown again. The second goes into the list in the file of keys.")


def _settings(flags: dict[str, Any], config: Path | None) -> Any:
    """The settings from all sources. Checks that bundles are intact and that names of models are among theirs."""
    from export.contract import verify
    from service import settings as known

    settings = known.load({name: value for name, value in flags.items() if value is not None}, config)
    if not settings.bundles:
        raise typer.BadParameter("there is nothing to serve: name a bundle with --bundle (`attnserve export` makes one)")
    known.check_names(settings, [verify(path).name for path in settings.bundles])
    return settings


@app.command()
def attention(
    text: Annotated[str, typer.Option(help="What is attended to.", show_default=False)],
    bundle: Annotated[Path | None, typer.Option(help="Bundle that was exported with --maps.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="In its place: a checkpoint folder, which needs torch.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for attention.png and attention.svg, which show all layers and heads.")] = Path(
        "out/attention"
    ),
    layer: Annotated[int, typer.Option(help="The layer shown on the terminal, from 0; -1 is the last.")] = -1,
    head: Annotated[int | None, typer.Option(help="The head shown on the terminal; the mean of all by default.")] = None,
) -> None:
    """Draw what a model attends to: every token's weights on every other, layer by layer and head by head.

    Mechanisms that never form this matrix have one too: how much of each token's value is in each token's answer.
    """
    if bool(bundle) == bool(checkpoint):
        raise typer.BadParameter("give a bundle with --bundle, or a checkpoint folder with --checkpoint, one of the two")
    with needing("figures"):
        from export import heatmaps
        from export.maps_of_bundle import maps_of_bundle
    if checkpoint:
        with needing("export"):
            from export.maps_of_checkpoint import maps_of_checkpoint
        maps = maps_of_checkpoint(checkpoint, text)
    else:
        assert bundle is not None
        maps = maps_of_bundle(bundle, text)
    shown = heatmaps.picked(maps, layer, head)
    files = [out / "attention.png", out / "attention.svg"]
    heatmaps.draw(maps, files)
    if len(maps.tokens) <= heatmaps.ON_TERMINAL:
        which = "mean of all heads" if head is None else f"head {head}"
        title = f"layer {layer % len(maps.A)}, {maps.layers[layer]}, {which}"
        terminal = Console()
        terminal.print(heatmaps.on_terminal(shown, maps.tokens, title, colour=terminal.color_system is not None))
    console.print(f"all layers and heads: [green]{', '.join(map(str, files))}[/green]", soft_wrap=True)


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Folder for the page, its pictures and what was measured; goes on with what is there.")] = Path(
        "out/compare"
    ),
    only: Annotated[str, typer.Option(help="Mechanisms, with commas; all by default.")] = "",
    longest: Annotated[int, typer.Option(min=64, help="Largest N: 64, 128, .. up to it.")] = 16_384,
    seconds: Annotated[float, typer.Option(min=0.01, help="So long is one N run, again and again.")] = 0.5,
    memory_gib: Annotated[float, typer.Option(min=0.1, help="An N that would take more is left out.")] = 6,
    runtime: Annotated[Runtime, typer.Option(help="torch measures the layers themselves.")] = Runtime.onnxruntime,
    docs: Annotated[Path | None, typer.Option(help="Folder that gets compare.md and its pictures too.")] = None,
) -> None:
    """Measure every attention mechanism side by side and write one page about them.

    After Ctrl-C or a kill, the same command goes on where it was. Leave the machine alone meanwhile.
    """
    with needing("figures"):
        from export.comparison import mechanisms, page, run
        from export.comparison.plan import LENGTHS, GiB, Plan
    names = mechanisms.chosen(only)
    lengths = tuple(N for N in LENGTHS if longest >= N)
    plan = Plan(lengths=lengths, seconds=seconds, memory_bytes=int(memory_gib * GiB), runtime=runtime.value)
    try:
        with progress_bar() as show:
            results = run.run(names, plan, out, show)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with what is in {out}")
        raise typer.Exit(130) from None
    found = {result.name: result for result in results}
    console.print(f"[green]{page.write(found, plan, out)}[/green]", soft_wrap=True)
    if docs is not None:
        page.write_markdown(found, plan, docs)
    if failed := [result for result in results if result.failure]:
        for result in failed:
            console.print(f"[bold red]{result.name}[/bold red]: {escape(str(result.failure))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def load(context: typer.Context) -> None:
    """Load a running service with Locust and judge it by pass marks. `attnserve load --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.load.command import app as load_app
    load_app(context.args, prog_name="attnserve load")


@app.command("bench-split", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench_split(context: typer.Context) -> None:
    """Measure profile split beside single. `attnserve bench-split --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.bench_split import app as bench_app
    bench_app(context.args, prog_name="attnserve bench-split")


@app.command("bench-long", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench_long(context: typer.Context) -> None:
    """Measure an encoder of linear cost beside its teacher on long texts. `attnserve bench-long --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.bench_long import app as bench_app
    bench_app(context.args, prog_name="attnserve bench-long")


@app.command("bench-faults", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench_faults(context: typer.Context) -> None:
    """Update, scale and kill a cluster of three nodes on this machine under load. `attnserve bench-faults --help` lists what it takes."""
    with needing("loadtest"):
        from loadtest.faults import app as bench_app
    bench_app(context.args, prog_name="attnserve bench-faults")


def _run(settings: Any) -> None:
    """Start, wait for a signal, stop. A service that cannot go on ends with status 1 and the reason."""
    from service.deployment.flags import prepare
    from service.deployment.front import Front, listen
    from service.deployment.running import LOG_FILE, Service, run_directory
    from service.deployment.watch import Watch, adopt
    from service.runtime.onnx import check_install
    from service.telemetry.logs import Follower, to_file

    check_install(settings.provider)
    with listen(settings.host, settings.port) as listener, run_directory() as run:
        adopt()
        prepare(settings)
        if settings.profile == "split":
            from service.deployment.gpus import check_gpus, gpus_here

            check_gpus(settings, gpus_here())
        to_file(None, settings.log_level)

        def end(reason: str) -> None:
            console.show_cursor(True)
            console.print(f"[bold red]error[/bold red]: {escape(reason)}", highlight=False, soft_wrap=True)
            service.kill()
            os._exit(1)

        front = Front(settings, run, listener)
        watch = Watch(run, front, end)
        service = Service(settings, run, front, watch)
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
def transfer_bar() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """(show, say): `show(name, bytes so far, bytes in all)` updates a progress bar with amounts and rates, `say(line)` prints a line above
    it. If stderr is no terminal, as in a pod, `show` prints a line every few seconds."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    told: dict[str, tuple[float, int]] = {}

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total, completed=done)
            progress.update(tasks[name], completed=done)
            now, (before_s, before) = time.monotonic(), told.setdefault(name, (time.monotonic(), done))
            if not console.is_terminal and now - before_s >= PROGRESS_EVERY_S:
                told[name] = (now, done)
                say(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {(done - before) / 1e6 / (now - before_s):,.1f} MB/s")

        yield show, say


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Imports that only an extra of the package brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(f"this command needs {error.name}, which is not installed: pip install 'attnserve[{extra}]'") from None


class MissingExtra(AttnserveError):
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
    """Entry point. Prints our own errors and OSErrors (a missing file, a full disk) without a traceback."""
    try:
        app()
    except (AttnserveError, OSError) as error:
        console.print(f"[bold red]error[/bold red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
