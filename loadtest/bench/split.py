"""`attnserve bench-split`: profile split beside single on the same cores, in turns; see README.md."""

import json
import sys
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from export import contract
from loadtest.common import machine, report, texts, wrk
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, attnserve
from loadtest.common.terminal import console, interruptible, progress, show
from loadtest.errors import LoadtestError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

CONNECTIONS, STREAMS, STREAM_TOKENS = 32, 16, 64
_MOST_PER_S = 2000  # texts prepared for a second of the generator
RATE, P50, TOKENS = "one 16-token text a request, 32 connections", "the same, 1 connection, p50", "16 streams of 64 tokens"
ROWS = (
    (RATE, "texts/s", Bar(at_least=0.6, reference="single")),
    (P50, "ms", Bar(at_most_more=4, reference="single")),
    (TOKENS, "tokens/s", Bar(at_least=0.7, reference="single")),
)


@app.command()
def bench_split(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    encoders: Annotated[int, typer.Option(min=1, help="Replicas of the encoder.")] = 1,
    generators: Annotated[int, typer.Option(min=1, help="Replicas of the decoder.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each run of the load generator.")] = 5,
    out: Annotated[Path, typer.Option(help="Directory for the JSON of this run.")] = Path("out/bench-split"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown on stdout.")] = False,
) -> None:
    """Measure what a gateway before pools of replicas costs beside one process. Ends with 1 when a bar is missed."""
    wrk.binary()
    names = contract.verify(encoder).name, contract.verify(decoder).name
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": ["attnserve", *sys.argv[1:]],
        **machine.describe(),
        "plan": {"rounds": rounds, "seconds": seconds, "encoders": encoders, "generators": generators},
    }
    split = ("--profile", "split", "--encoders", str(encoders), "--generators", str(generators))
    figures: dict[str, dict[str, list[float]]] = {"single": defaultdict(list), "split": defaultdict(list)}
    with interruptible(), progress(2 * rounds) as begin:
        for number in range(1, rounds + 1):
            for profile, flags in (("single", ()), ("split", split)):
                begin(f"round {number}/{rounds}: {profile}")
                with attnserve(encoder, names[0], flags=("--bundle", str(decoder), *flags)) as server:
                    for work, figure in measured(server, names[1], seconds, f"{profile} {number}").items():
                        figures[profile][work].append(figure)
    rows = [
        Row(work=work, unit=unit, bar=bar, figures=tuple(figures["split"][work]), references=tuple(figures["single"][work]))
        for work, unit, bar in ROWS
    ]
    path = out / f"{about['date'].replace(':', '-')}.json"
    report.write_json(path, rows, about, [{"profile": profile, **found} for profile, found in figures.items()])
    show(rows, f"split beside single, {about['cpus']} cores, {about['cpu']}, {about['date']}", markdown=markdown)
    console.print(f"every figure: {path}", soft_wrap=True)
    if any(row.verdict is report.Verdict.failed for row in rows):
        raise typer.Exit(1)


def measured(server: Server, decoder: str, seconds: float, seed: str) -> dict[str, float]:
    """All work of one round, on a service that has been warmed by a little of each."""
    streaming = replace(server, model=decoder, path="/v1/completions")
    embed(server, f"warm {seed}", CONNECTIONS, 1)
    stream(streaming, 1, first=10**9)
    return {
        RATE: embed(server, f"many {seed}", CONNECTIONS, seconds).per_s,
        P50: embed(server, f"one {seed}", 1, seconds).p50_ms,
        TOKENS: stream(streaming, seconds, first=0),
    }


def embed(server: Server, seed: str, connections: int, seconds: float) -> wrk.Load:
    bodies = [server.body(text) for text in texts.short(int(_MOST_PER_S * max(seconds, 1)), seed)]
    return valid(wrk.run(server.url, bodies, connections=connections, seconds=seconds))


def stream(server: Server, seconds: float, *, first: int) -> float:
    """Tokens a second of whole streams, one after the other on each connection. Prompts and seeds differ."""
    asked = {"model": server.model, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    seeds = range(first, first + int(_MOST_PER_S * max(seconds, 1)))
    bodies = [json.dumps({**asked, "prompt": f"text {seed}", "seed": seed}) for seed in seeds]
    return valid(wrk.run(server.url, bodies, connections=STREAMS, seconds=seconds)).per_s * STREAM_TOKENS


def valid(load: wrk.Load) -> wrk.Load:
    """LoadtestError for a run that proves nothing."""
    if load.problems:
        raise LoadtestError(f"this run proves nothing: {', '.join(load.problems)}")
    return load


if __name__ == "__main__":
    app(prog_name="attnserve bench-split")
