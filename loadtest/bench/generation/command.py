"""`attnserve bench-generate`: text beside the bare step loop, a softmax twin and transformers, in alternating rounds; see README.md."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from export import contract
from loadtest.bench.generation import contestants, plots
from loadtest.bench.generation.measuring import Measuring
from loadtest.bench.generation.plan import Part, Plan
from loadtest.bench.generation.rows import rows
from loadtest.common import machine, report, wrk
from loadtest.common.terminal import chosen, console, interruptible, progress, show
from loadtest.errors import LoadtestError
from loadtest.in_process import batches
from loadtest.in_process.long_sequences import STRETCH, LongSequences
from loadtest.in_process.shapes import MEMORY_BYTES, SHAPES

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def bench_generate(
    bundle: Annotated[Path, typer.Option(help="Bundle of an fp32 decoder.", show_default=False)],
    checkpoint: Annotated[
        Path | None, typer.Option(help="The folder that the bundle was made of: its softmax twin and a GPT-2 get its shape.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the longer runs.")] = 5,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at the same time.")] = 32,
    tokens: Annotated[int, typer.Option(min=2000, help="Length of the one long sequence.")] = 100_000,
    only: Annotated[str, typer.Option(help="Parts to measure, with commas.")] = ",".join(Part),
    out: Annotated[Path, typer.Option(help="Directory for the JSON and the plots of this run.")] = Path("out/bench-generate"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
) -> None:
    """Measure text: the engine, the service, prefill, latency, and a constant state beside a growing one.

    Builds, starts and stops everything itself. Ends with 1 when a bar is missed. Leave the machine alone meanwhile.
    """
    manifest = contract.verify(bundle)
    if manifest.kind != "decoder":
        raise LoadtestError(f"{bundle} is of kind {manifest.kind}: only decoders are measured here")
    plan = Plan(
        bundle=bundle,
        model=manifest.name,
        rounds=rounds,
        seconds=seconds,
        slots=slots,
        tokens=tokens,
        threads=machine.cpus(),
        parts=chosen(only, Part),
        shapes=SHAPES,
        memory_bytes=MEMORY_BYTES,
    )
    if Part.service in plan.parts:
        wrk.binary()
    about = told(plan, manifest)
    with interruptible(), TemporaryDirectory() as folder:
        built = contestants.build(plan, checkpoint, Path(folder), console.print)
        for part, why in built.left_out.items():
            console.print(f"[bold yellow]left out of {part}[/bold yellow]: {why}", soft_wrap=True)
        measuring, sequences = measured(plan, built)
    made = rows(plan, measuring.figures, sequences.ours, sequences.twins, built.left_out)
    path = out / f"{about['date'].replace(':', '-')}.json"
    stretches = (("flat", sequences.ours), ("flat twin", sequences.twins))
    raw: list[dict[str, Any]] = [{"work": work, **stretch.__dict__} for work, found in stretches for stretch in found]
    report.write_json(path, made, about, [*measuring.raw(), *raw])
    hardware = f"{about['cpus']} cores, {about['cpu']}"
    draw(plan, measuring, sequences, path, hardware)
    title = f"{manifest.name}, {manifest.precision}, {hardware}, {rounds} rounds of {seconds:g} s, {about['date']}"
    show(made, title, markdown=markdown)
    console.print(f"every figure: {path}", soft_wrap=True)
    if any(row.verdict is report.Verdict.failed for row in made):
        raise typer.Exit(1)


def told(plan: Plan, manifest: contract.Manifest) -> dict[str, Any]:
    """What goes into the JSON beside the figures."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["attnserve", *sys.argv[1:]],
        **machine.describe(),
        "bundle": {"name": manifest.name, "precision": manifest.precision, "fingerprint": manifest.fingerprint},
        "plan": {
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "slots": plan.slots,
            "tokens": plan.tokens,
            "parts": sorted(plan.parts),
        },
    }


def measured(plan: Plan, built: contestants.Contestants) -> tuple[Measuring, LongSequences]:
    """All rounds, and then the long sequences."""
    flat = Part.flat in plan.parts
    parts = [part for part in Part if part in plan.parts - {Part.flat}]
    measuring = Measuring(plan, built)
    with progress(plan.rounds * len(parts) + flat * -(-plan.tokens // STRETCH)) as begin:
        for number in range(1, plan.rounds + 1):
            for part in parts:
                begin(f"round {number}/{plan.rounds}: {part}")
                getattr(measuring, part)()
        sequences = LongSequences(plan.bundle, plan.tokens, plan.threads, built.twin)
        if flat:
            sequences.run(begin)
    return measuring, sequences


def draw(plan: Plan, measuring: Measuring, sequences: LongSequences, path: Path, hardware: str) -> None:
    """The pictures beside the JSON."""
    if sequences.ours:
        plots.price_of_a_token(
            sequences.ours,
            sequences.twins,
            path.with_suffix(".png"),
            f"{plan.model}, {hardware}",
            state_bytes=batches.row_bytes(plan.bundle),
            twin_token_bytes=sequences.twin_token_bytes,
        )
    if measuring.contestants.paper and Part.batches in plan.parts:
        title = f"within {plan.memory_bytes / 2**30:g} GiB of states or caches, {hardware}"
        plots.batch_ladder(measuring.figures, plan.shapes, path.with_name(f"{path.stem}-batches.png"), title)


if __name__ == "__main__":
    app(prog_name="attnserve bench-generate")
