"""`attnserve bench-generate`: compares text generation with the bare step loop (the step graph in ONNX Runtime without an engine), a
softmax model and transformers, in turns; see loadtest/README.md."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from loadtest.bench.generation import contestants, plots
from loadtest.bench.generation.contestants import GenerationPart, GenerationPlan
from loadtest.bench.generation.measuring import Measuring
from loadtest.bench.generation.rows import rows
from loadtest.bench.runner import Markdown, Measurements, Out, Rounds, Seconds, finish, manifest_of, run
from loadtest.common import machine, wrk
from loadtest.common.terminal import chosen
from loadtest.in_process.shapes import MEMORY_BYTES, SHAPES
from service.terminal import command_app, console

app = command_app()


@app.command()
def bench_generate(
    bundle: Annotated[Path, typer.Option(help="Bundle of an fp32 decoder.", show_default=False)],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The folder that the bundle was made of: its softmax twin and a GPT-2 get its shape.")
    ] = None,
    rounds: Rounds = 3,
    seconds: Seconds = 5,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at the same time.")] = 32,
    tokens: Annotated[int, typer.Option(min=2000, help="Length of the one long sequence.")] = 100_000,
    only: Annotated[str, typer.Option(help="Parts to measure, with commas.")] = ",".join(GenerationPart),
    out: Out = Path("out/bench-generate"),
    markdown: Markdown = False,
) -> None:
    """Measure text generation: engine, service, prefill, latency, and a constant-size state against a growing KV cache.

    Builds, starts and stops everything itself. Exits with 1 if a required value is missed. Keep the machine idle otherwise.
    """
    manifest, parts = manifest_of(bundle, "decoder"), chosen(only, GenerationPart)
    plan = GenerationPlan(
        bundle=bundle,
        model=manifest.name,
        seconds=seconds,
        slots=slots,
        tokens=tokens,
        threads=machine.cpus(),
        parts=parts,
        shapes=SHAPES,
        memory_bytes=MEMORY_BYTES,
    )
    if GenerationPart.service in parts:
        wrk.binary()
    with TemporaryDirectory() as folder:
        built = contestants.build(plan, checkpoint, Path(folder), console.print)
        measured = Measurements(absent=built.left_out)
        said = {"seconds": seconds, "slots": slots, "tokens": tokens, "parts": sorted(parts)}
        about = run(Measuring(plan, built, measured).turns(), rounds, measured, [bundle], said)
        draw = partial(plots.draw, plan, built, measured)
        subject = f"{manifest.name}, {manifest.precision}"
        finish(rows(plan, measured), measured, about, subject=subject, out=out, markdown=markdown, draw=draw)
