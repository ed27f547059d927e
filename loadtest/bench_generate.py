"""`attnserve bench-generate`: the bare step loop, the engine and the service side by side, in alternating rounds; see README.md here."""

import sys
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from export import contract
from loadtest import machine, report, wrk
from loadtest.bench import console, interruptible, progress
from loadtest.errors import LoadtestError
from loadtest.generation import engine, plot, steps, streams
from loadtest.report import Bar, Row
from loadtest.server import attnserve

CHUNKS = (16, 64, 256, 1024)
FLAT = 1.05  # how much dearer the last thousand tokens may be than the first

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


class Part(StrEnum):
    engine = "engine"
    service = "service"
    prefill = "prefill"
    flat = "flat"


@app.command()
def bench_generate(
    bundle: Annotated[Path, typer.Option(help="Bundle of an fp32 decoder.", show_default=False)],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each run.")] = 10,
    slots: Annotated[int, typer.Option(min=1, help="Sequences at the same time.")] = 32,
    tokens: Annotated[int, typer.Option(min=2000, help="Length of the one long sequence.")] = 100_000,
    only: Annotated[str, typer.Option(help="Parts to measure, with commas.")] = ",".join(Part),
    out: Annotated[Path, typer.Option(help="Directory for the JSON and the plot of this run.")] = Path("out/bench-generate"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
) -> None:
    """Measure tokens a second of the bare step loop, of the engine and of the service, and a token's price along a long sequence.

    Starts and stops everything itself. Ends with 1 when a bar is missed. Leave the machine alone meanwhile.
    """
    words = {word.strip() for word in only.split(",") if word.strip()}
    if not words or words - set(Part):
        raise typer.BadParameter(f"{only!r}: name parts out of {','.join(Part)}", param_hint="--only")
    parts = frozenset(map(Part, words))
    manifest = contract.verify(bundle)
    if manifest.kind != "decoder":
        raise LoadtestError(f"{bundle} is of kind {manifest.kind}: only decoders are measured here")
    if Part.service in parts:
        wrk.binary()
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["attnserve", *sys.argv[1:]],
        **machine.describe(),
        "bundle": {"name": manifest.name, "precision": manifest.precision, "fingerprint": manifest.fingerprint},
        "plan": {"rounds": rounds, "seconds": seconds, "slots": slots, "tokens": tokens, "parts": sorted(parts)},
    }
    measuring = Measuring(bundle, manifest.name, seconds, slots, machine.cpus())
    path = out / f"{about['date'].replace(':', '-')}.json"
    with interruptible(), progress(rounds * len(parts - {Part.flat}) + (Part.flat in parts) * (tokens // 1000)) as show:
        for number in range(1, rounds + 1):
            for part in (Part.engine, Part.service, Part.prefill):
                if part in parts:
                    show(f"round {number}/{rounds}: {part}")
                    getattr(measuring, part)()
        stretches = []
        if Part.flat in parts:
            for stretch in steps.long_sequence(bundle, tokens, measuring.threads):
                show(f"one sequence: token {stretch.first + 1000:,} of {tokens:,}")
                stretches.append(stretch)
    made = rows(measuring.measured, stretches, slots)
    if stretches:
        plot.price_of_a_token(stretches, path.with_suffix(".png"), f"{manifest.name}, {about['cpus']} cores, {about['cpu']}")
    raw: list[dict[str, Any]] = [{"work": work, "figures": figures} for work, figures in measuring.measured.items()]
    report.write_json(path, made, about, [*raw, *({"work": "flat", **stretch.__dict__} for stretch in stretches)])
    title = (
        f"{manifest.name}, {manifest.precision}, {about['cpus']} cores, {about['cpu']}, {rounds} rounds of {seconds:g} s, {about['date']}"
    )
    if markdown:
        print(report.markdown(made, title))
    else:
        terminal = Console()
        Console(width=None if terminal.is_terminal else 150).print(report.table(made, title))
    console.print(f"every figure: {path}", soft_wrap=True)
    if any(row.verdict is report.Verdict.failed for row in made):
        raise typer.Exit(1)


class Measuring:
    """One figure a round of each kind of work, in tokens a second."""

    def __init__(self, bundle: Path, model: str, seconds: float, slots: int, threads: int) -> None:
        self.bundle, self.model, self.seconds, self.slots, self.threads = bundle, model, seconds, slots, threads
        self.measured: dict[str, list[float]] = {}

    def engine(self) -> None:
        for rows in (1, self.slots):
            self._note(f"bare {rows}", steps.tokens_per_s(self.bundle, rows, self.seconds, self.threads))
            self._note(f"engine {rows}", engine.tokens_per_s(self.bundle, rows, self.seconds, self.threads))

    def service(self) -> None:
        if f"engine {self.slots}" not in self.measured:
            self._note(f"engine {self.slots}", engine.tokens_per_s(self.bundle, self.slots, self.seconds, self.threads))
        with attnserve(self.bundle, self.model) as server:
            self._note("service", streams.tokens_per_s(replace(server, path="/v1/completions"), self.slots, self.seconds))

    def prefill(self) -> None:
        for chunk in CHUNKS:
            self._note(f"prefill {chunk}", steps.prefill_tokens_per_s(self.bundle, chunk, self.seconds / 4, self.threads))

    def _note(self, work: str, figure: float) -> None:
        self.measured.setdefault(work, []).append(figure)


def rows(measured: dict[str, list[float]], stretches: list[steps.Stretch], slots: int) -> list[Row]:
    """One row for each bar, and below it what stands beside it."""

    def row(work: str, told: str, reference: str = "", bar: Bar | None = None) -> list[Row]:
        figures = tuple(measured.get(work, ()))
        return [Row(work=told, unit="tokens/s", figures=figures, references=tuple(measured.get(reference, ())), bar=bar)] if figures else []

    bare, alone = Bar(at_least=0.9, reference="the bare step loop"), Bar(at_least=0.8, reference="the engine alone")
    made = row(f"engine {slots}", f"the engine, {slots} runs", f"bare {slots}", bare if f"bare {slots}" in measured else None)
    made += row("engine 1", "the engine, 1 run", "bare 1")
    made += row("service", f"the service, {slots} streams over HTTP", f"engine {slots}", alone)
    for chunk in CHUNKS:
        made += row(f"prefill {chunk}", f"bare prefill in chunks of {chunk}")
    if len(stretches) > 1:
        first, last = stretches[0], stretches[-1]
        made.append(
            Row(
                work=f"a token at position {last.first:,} against one of the first thousand",
                unit="times as long",
                figures=(last.s_per_token / first.s_per_token,),
                bar=Bar(at_most=FLAT),
            )
        )
        grown = (last.rss_bytes - first.rss_bytes) / 2**20
        made.append(Row(work="resident memory gained on the way", unit="MiB", figures=(grown,)))
    return made


if __name__ == "__main__":
    app(prog_name="attnserve bench-generate")
