"""The commands of this package: export, inspect, attention, compare. PyTorch is imported only when a command runs, so `--help` is fast."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from export import contract
from service.terminal import command_app, console, needing, progress_bar

app = command_app()


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Bundle directory to write; an older bundle there is replaced at the end.", show_default=False)],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with config.json, model.safetensors and tokenizer.json; or a GGUF file.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Instead of --checkpoint: a file that describes an encoder with any attention; see models/configs.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name that clients send as `model`; the directory's name by default.")] = None,
    precision: Annotated[
        contract.Precision,
        typer.Option(
            help="fp16 is for GPUs, as-stored for GGUF files. Decoders: int4, and rough ones, which may change answers. "
            "Encoders: int8 must reach --min-cosine."
        ),
    ] = "fp32",
    attention: Annotated[
        str, typer.Option(help="softmax keeps the attention of the checkpoint; linear replaces it untrained.")
    ] = "softmax",
    min_cosine: Annotated[float, typer.Option(min=0.5, max=1, help="int8 encoders: lowest cosine to fp32 on the golden texts.")] = 0.99,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Decoders: text whose bits per byte are measured; a file, or a folder of `python -m models.training collect`."),
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Add the graph that `attnserve attention` and /v1/attention use.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Add a graph for GPUs, in fp16; see docs/gpu.md.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Decoders: softmax layers attend to this many tokens: 512, 1024 or 2048; see docs/generation.md.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="The checkpoint is a masked language model that makes sparse vectors (SPLADE).")
    ] = False,
    any_tokenizer_pattern: Annotated[
        bool, typer.Option(help="Accept a tokenizer with regular expressions that no published one has; see docs/models.md.")
    ] = False,
) -> None:
    """Write a checkpoint as a bundle: ONNX graph, tokenizer, manifest, golden vectors, all checked against torch."""
    if (source := checkpoint or config) is None:
        raise typer.BadParameter("give the model: --checkpoint FOLDER (weights), or --config FILE (a description, for random weights)")
    if checkpoint and config:
        raise typer.BadParameter("give either --checkpoint FOLDER (weights) or --config FILE (a description), not both")
    with needing("export"):
        from export.bundle import export_bundle, export_file
        from export.summary import bits_per_byte
    if checkpoint is not None:
        from models.checkpoints.gguf.file import gguf_file
        from service.tokenization.tokenizer_file import check_form

        if gguf_file(checkpoint) is None:  # the tokenizer of a GGUF file is made by the export
            check_form(checkpoint / contract.TOKENIZER, any_pattern=any_tokenizer_pattern)
    with progress_bar() as show:
        manifest = (export_file if config else export_bundle)(
            source,
            out,
            name=name,
            precision=precision,
            attention=attention,
            min_cosine=min_cosine,
            held_out=held_out,
            maps=maps,
            gpu=gpu,
            window=window,
            sparse=sparse,
            progress=show,
            check_template=_check_template,
        )
    console.print(f"[green]{out}[/green]: {manifest.kind}, {manifest.precision}, fingerprint {manifest.fingerprint[:12]}")
    if (bits := bits_per_byte(manifest)) is not None:
        console.print(f"Bits per byte: {bits}", highlight=False, soft_wrap=True)
    if manifest.decoder is not None and (answers := manifest.decoder.answers) is not None:
        console.print(f"Answers: {answers.in_words}", highlight=False, soft_wrap=True)
    console.print(f"Serve it: [bold]attnserve serve --bundle {out}[/bold]")


def _check_template(source: str) -> None:
    """Compile a chat template and render a message with it, as the service does at its start. Raises ExportError if that fails."""
    from export.errors import ExportError
    from service.generation.chat.template import ChatTemplate

    try:
        ChatTemplate(source).close()
    except ValueError as error:
        raise ExportError(f"{error}, so it could not be served: correct the template, or choose another checkpoint") from None


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle directory.", show_default=False)],
    graph: Annotated[bool, typer.Option("--graph", help="Draw the histogram of operators.")] = False,
) -> None:
    """Show what a bundle answers, its limits and size, then details and files. Every file is checked against the manifest."""
    from export.summary import render

    Console().print(render(bundle, graph=graph))


@app.command()
def attention(
    text: Annotated[str, typer.Option(help="Text whose attention weights are shown.", show_default=False)],
    bundle: Annotated[Path | None, typer.Option(help="Bundle that was exported with --maps.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Instead of --bundle: a checkpoint folder, which needs torch.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for attention.png and attention.svg, which show all layers and heads.")] = Path(
        "out/attention"
    ),
    layer: Annotated[int, typer.Option(help="The layer shown on the terminal, from 0; -1 is the last.")] = -1,
    head: Annotated[int | None, typer.Option(help="The head shown on the terminal; the mean of all by default.")] = None,
) -> None:
    """Draw attention maps: the weight of every token for every other token, for each layer and head.

    Some mechanisms never compute such weights. Their maps show how much of each token's value is in each token's output.
    """
    if bool(bundle) == bool(checkpoint):
        raise typer.BadParameter("give either --bundle FOLDER or --checkpoint FOLDER, not both")
    with needing("figures"):
        from export.maps import heatmaps
        from export.maps.of_text import maps_of_bundle, maps_of_checkpoint
    if checkpoint:
        with needing("export"):
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
    out: Annotated[Path, typer.Option(help="Folder for the page, its pictures and the results. Results that it has are kept.")] = Path(
        "out/compare"
    ),
    only: Annotated[str, typer.Option(help="Names of mechanisms, separated by commas; all by default.")] = "",
    longest: Annotated[int, typer.Option(min=64, help="Largest length N; all of 64, 128, .. up to it are measured.")] = 16_384,
    seconds: Annotated[float, typer.Option(min=0.01, help="Duration of the repeated runs at one N.")] = 0.5,
    memory_gib: Annotated[float, typer.Option(min=0.1, help="A length N that would need more is left out.")] = 6,
) -> None:
    """Measure all attention mechanisms under the same conditions, and write one page about them.

    After Ctrl-C or a kill, the same command continues. Keep the machine otherwise idle.
    """
    with needing("figures"):
        from export.comparison import mechanisms, page, run
    names = mechanisms.chosen(only)
    lengths = tuple(N for N in run.LENGTHS if longest >= N)
    plan = run.ComparisonPlan(lengths=lengths, seconds=seconds, memory_bytes=int(memory_gib * run.GiB))
    try:
        with progress_bar() as show:
            results = run.run(names, plan, out, show)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command continues with the results in {out}")
        raise typer.Exit(130) from None
    console.print(f"[green]{page.write({result.name: result for result in results}, plan, out)}[/green]", soft_wrap=True)
    if failed := [result for result in results if result.failure]:
        for result in failed:
            console.print(f"[bold red]{result.name}[/bold red]: {escape(str(result.failure))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
