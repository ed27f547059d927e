"""The part `split`: the deployment profiles `single` (one replica) and `split` (a gateway with pools of replicas) on the same cores."""

from functools import partial

from loadtest.bench.overhead import Form, sent
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service

_MOST_PER_S = 2000  # texts that are prepared for each second of load
RATE, P50, TOKENS = "one 16-token text a request, 32 connections", "the same, 1 connection, p50", "16 streams of 64 tokens"
FORMS = {RATE: Form(32), P50: Form(1), TOKENS: Form(16, stream=True)}
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
    for work in (RATE, TOKENS):
        sent(FORMS[work], server, decoder, f"warm {seed}", 1, _MOST_PER_S)
    found = {}
    for work, form in FORMS.items():
        load = sent(form, server, decoder, f"{work} {seed}", seconds, _MOST_PER_S)
        found[work] = Figure(load.p50_ms if work == P50 else load.per_s * form.per_request, problem="; ".join(load.problems))
    return found
