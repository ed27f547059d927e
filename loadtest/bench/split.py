"""The command `attnserve bench-split`. It measures the speed of the deployment profiles `single` (one replica) and `split` (a gateway with
pools of replicas) in turns, on the same cores. See loadtest/README.md.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loadtest.bench import runner
from loadtest.bench.runner import Contestant, Figure, Measurement, Measurements
from loadtest.common import texts, wrk
from loadtest.common.report import Bar
from loadtest.common.server import MeasuredServer, attnserve
from loadtest.errors import LoadtestError
from service.terminal import command_app

app = command_app()

CONNECTIONS, STREAMS, STREAM_TOKENS = 32, 16, 64
_MOST_PER_S = 2000  # number of texts that are prepared for each second of load
RATE, P50, TOKENS = "one 16-token text a request, 32 connections", "the same, 1 connection, p50", "16 streams of 64 tokens"
BARS = {
    RATE: ("texts/s", Bar(at_least=0.6, reference="single")),
    P50: ("ms", Bar(at_most_more=4, reference="single")),
    TOKENS: ("tokens/s", Bar(at_least=0.7, reference="single")),
}


@app.command()
def bench_split(
    encoder: Annotated[Path, typer.Option(help="Bundle of an encoder.")] = Path("bundles/all-MiniLM-L6-v2"),
    decoder: Annotated[Path, typer.Option(help="Bundle of a decoder.")] = Path("bundles/python-gated-delta"),
    encoders: Annotated[int, typer.Option(min=1, help="Replicas of the encoder.")] = 1,
    generators: Annotated[int, typer.Option(min=1, help="Replicas of the decoder.")] = 1,
    rounds: runner.Rounds = 3,
    seconds: runner.WholeSeconds = 5,
    out: runner.Out = Path("out/bench-split"),
    markdown: runner.Markdown = False,
) -> None:
    """Measure the cost of a gateway with pools of replicas compared with a single process. Exits with 1 if a required value is missed."""
    wrk.binary()
    names, measured = (runner.manifest_of(encoder, "encoder").name, runner.manifest_of(decoder, "decoder").name), Measurements()
    split = ("--profile", "split", "--encoders", str(encoders), "--generators", str(generators))

    def measure(profile: str, server: MeasuredServer) -> None:
        for work, figure in figures_of(server, names[1], seconds, f"{profile} {measured.round}").items():
            measured.note(work, profile, figure=figure)

    contestants = [
        Contestant(
            profile,
            [Measurement("embeddings and streams", partial(measure, profile))],
            partial(attnserve, encoder, names[0], flags=("--bundle", str(decoder), *flags)),
        )
        for profile, flags in (("single", ()), ("split", split))
    ]
    plan = {"seconds": seconds, "encoders": encoders, "generators": generators}
    about = runner.run(contestants, rounds, measured, [encoder, decoder], plan)
    rows = [
        runner.compare(measured, work, unit, Figure(work, "split", "figure"), Figure(work, "single", "figure"), bar)
        for work, (unit, bar) in BARS.items()
    ]
    runner.finish(rows, measured, about, subject="split beside single", out=out, markdown=markdown)


def figures_of(server: MeasuredServer, decoder: str, seconds: float, seed: str) -> dict[str, float]:
    """Warm up the service with embeddings and streams, then measure the figures of one turn: embeddings/s, latency, streamed tokens/s."""
    streaming = replace(server, model=decoder, path="/v1/completions")
    embed(server, f"warm {seed}", CONNECTIONS, 1)
    stream(streaming, 1, first=10**9)
    return {
        RATE: embed(server, f"many {seed}", CONNECTIONS, seconds).per_s,
        P50: embed(server, f"one {seed}", 1, seconds).p50_ms,
        TOKENS: stream(streaming, seconds, first=0),
    }


def embed(server: MeasuredServer, seed: str, connections: int, seconds: float) -> wrk.Load:
    bodies = [server.body(text) for text in texts.short(int(_MOST_PER_S * max(seconds, 1)), seed)]
    return valid(wrk.run(server.url, bodies, connections=connections, seconds=seconds))


def stream(server: MeasuredServer, seconds: float, *, first: int) -> float:
    """Return the tokens per second of all streams together. Each of STREAMS connections reads one stream after the other to its end. Their
    prompts are numbered from `first`, so no two are equal."""
    asked = {"model": server.model, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    seeds = range(first, first + int(_MOST_PER_S * max(seconds, 1)))
    bodies = [json.dumps({**asked, "prompt": f"text {seed}", "seed": seed}) for seed in seeds]
    return valid(wrk.run(server.url, bodies, connections=STREAMS, seconds=seconds)).per_s * STREAM_TOKENS


def valid(load: wrk.Load) -> wrk.Load:
    """Return the results of a wrk run. Raises LoadtestError if the run had problems."""
    if load.problems:
        raise LoadtestError(f"this load run is not valid: {', '.join(load.problems)}")
    return load
