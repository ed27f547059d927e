"""The part `split`: the deployment profiles `single` (one replica) and `split` (a gateway with pools of replicas) on the same cores."""

import json
from functools import partial

from loadtest.common import texts, wrk
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service

CONNECTIONS, STREAMS, STREAM_TOKENS = 32, 16, 64
_MOST_PER_S = 2000  # texts that are prepared for each second of load
RATE, P50, TOKENS = "one 16-token text a request, 32 connections", "the same, 1 connection, p50", "16 streams of 64 tokens"
BARS = {
    RATE: ("texts/s", Bar(at_least=0.6, reference="single")),
    P50: ("ms", Bar(at_most_more=4, reference="single")),
    TOKENS: ("tokens/s", Bar(at_least=0.7, reference="single")),
}


def benchmark(plan: Plan) -> Benchmark:
    encoder, decoder = plan.manifest(0, "encoder").name, plan.manifest(1, "decoder").name
    pools = ("--profile", "split", "--encoders", plan.options["encoders"], "--generators", plan.options["generators"])
    turn = iter(range(10**6))
    sides = [
        Side(
            profile,
            {"embeddings and streams": lambda server: figures_of(server, decoder, plan.seconds, f"turn {next(turn)}")},
            partial(Service, plan.bundles, *flags, model=encoder),
        )
        for profile, flags in (("single", ()), ("split", pools))
    ]
    return Benchmark(sides, [Row(work, unit, ("split", work), ("single", work), bar) for work, (unit, bar) in BARS.items()])


def figures_of(server: Server, decoder: str, seconds: float, seed: str) -> Figures:
    """Warm up the service with embeddings and streams, then measure one turn."""
    embed(server, f"warm {seed}", CONNECTIONS, 1)
    stream(server, decoder, f"warm {seed}", 1)
    many, one, streams = (
        embed(server, f"many {seed}", CONNECTIONS, seconds),
        embed(server, f"one {seed}", 1, seconds),
        stream(server, decoder, seed, seconds),
    )
    return {
        RATE: Figure(many.per_s, problem="; ".join(many.problems)),
        P50: Figure(one.p50_ms, problem="; ".join(one.problems)),
        TOKENS: Figure(streams.per_s * STREAM_TOKENS, problem="; ".join(streams.problems)),
    }


def embed(server: Server, seed: str, connections: int, seconds: float) -> wrk.Load:
    bodies = [server.body(text) for text in texts.short(int(_MOST_PER_S * max(seconds, 1)), seed)]
    return wrk.run(server.url + server.path, bodies, connections=connections, seconds=seconds)


def stream(server: Server, decoder: str, seed: str, seconds: float) -> wrk.Load:
    """Each of STREAMS connections reads one stream after the other to its end. No two prompts are equal."""
    asked = {"model": decoder, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    bodies = [json.dumps({**asked, "prompt": f"{seed} {number}", "seed": number}) for number in range(int(_MOST_PER_S * max(seconds, 1)))]
    return wrk.run(f"{server.url}/v1/completions", bodies, connections=STREAMS, seconds=seconds)
