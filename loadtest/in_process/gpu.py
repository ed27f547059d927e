"""The part `gpu`: the graphs for GPUs. It shows which provider computes them, whether they give what the CPU gives, and how fast they are.

It needs, in the service's environment, onnxruntime-gpu in place of onnxruntime (docs/gpu.md), and bundles exported with `--gpu`. With
`--set provider=cpu` it runs through without a GPU, to try it: the encoder's graph is then its twin (`export/gpu/cpu_twin.py`).
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from export import contract
from loadtest.common import wrk
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service
from loadtest.errors import LoadtestError
from loadtest.in_process.bare import lowest_cosine
from loadtest.in_process.steps import calls_per_s
from service.encoding.gpu.session import PackedSession
from service.runtime.onnx import CPU, CUDA, OnnxSession, check_install, elsewhere

PROVIDERS = {"cuda": CUDA, "cpu": CPU}
LEAST_COSINE = 0.999  # between vectors of the GPU and of the CPU, whose bundle may have weights in float32
CONNECTIONS, HTTP_TEXTS, HTTP_TOKENS = 32, 32, 128  # texts of a request, and tokens of a text
_MOST_PER_S = 1_000  # requests that are prepared for each second over HTTP


def benchmark(plan: Plan) -> Benchmark:
    """Measure bundles of encoders. Raises LoadtestError for one without a graph for GPUs."""
    provider = plan.options["provider"]
    if provider not in PROVIDERS:
        raise LoadtestError(f"provider={provider}: choose from {', '.join(PROVIDERS)}")
    check_install(provider)
    sides: list[Side] = []
    rows: list[Row] = []
    texts = plan.options["texts"].split(",")
    for bundle in plan.bundles:
        manifest = contract.verify(bundle)
        if manifest.gpu_graph is None or manifest.kind == "decoder":
            raise LoadtestError(f"{bundle} has no graph for GPUs: export it with `attnserve export --gpu`")
        measure = partial(of_encoder, bundle, manifest, PROVIDERS[provider], texts, plan.seconds, plan.folder)
        sides.append(Side("encoder", {"encoder": measure}))
        rows.append(Row("encoder: 1 - lowest cosine to the CPU's vectors", "", ("encoder", "loss"), bar=Bar(at_most=1 - LEAST_COSINE)))
        rows += [Row(f"{size.replace('x', ' texts x ')} tokens", "tokens/s", ("encoder", size)) for size in texts]
        for gateways in dict.fromkeys((0, int(plan.options["gateways"]))):
            flags: tuple[str, ...] = ("--provider", provider, "--set", "cache_bytes=0")
            flags += ("--profile", "split", "--set", f"gateways={gateways}") if gateways else ()
            name = f"HTTP, {gateways} gateways" if gateways else "HTTP"
            sides.append(Side(name, {"http": partial(over_http, manifest, plan.seconds)}, partial(Service, [bundle], *flags)))
            work = f"{name}: {HTTP_TEXTS} texts of {HTTP_TOKENS} token ids a request, {CONNECTIONS} connections"
            rows.append(Row(work, "tokens/s", (name, "tokens"), ("encoder", "best")))
    return Benchmark(sides, rows)


def of_encoder(
    bundle: Path, manifest: contract.Manifest, provider: str, sizes: Sequence[str], seconds: float, folder: Path, _: object
) -> Figures:
    assert manifest.gpu_graph is not None
    shapes = [(int(B), int(N)) for B, N in (size.split("x") for size in sizes)]
    longest, output, random = manifest.limits.max_tokens, manifest.traits.output, np.random.default_rng(0)

    def texts(lengths: Sequence[int]) -> list[list[int]]:
        return [random.integers(0, manifest.limits.vocab_size, min(length, longest)).tolist() for length in lengths]

    graph = bundle / manifest.gpu_graph.graph.file
    if provider == CPU:
        from export.gpu.cpu_twin import write_cpu_twin  # loads `onnx`, which a GPU does not need

        write_cpu_twin(graph, graph := folder / "twin.onnx")
    most = max(B * min(N, longest) for B, N in shapes)
    session = PackedSession(graph, manifest.gpu_graph, max_tokens=longest, most_tokens=most, provider=provider)
    ids = texts(random.integers(1, longest + 1, 20).tolist())
    served = OnnxSession(bundle, manifest, threads=1, provider="cpu")
    loss = 1 - lowest_cosine(session.run([output], ids, None)[output], served.run([output], ids, None)[output])
    # The number of nodes of each operator. All are on the session's provider, or it would not have been opened.
    operators = ", ".join(f"{n} {operator}" for operator, n in sorted(elsewhere(session.session, "").items()))
    found: dict[str, float | Figure] = {"loss": Figure(loss, operators)}
    rates = {}
    for size, (B, N) in zip(sizes, shapes, strict=True):
        batch = texts([N] * B)
        call = partial(session.run, [output], batch, None)
        for _ in range(3):  # the first may record a CUDA graph
            call()
        per_s = B * calls_per_s(call, seconds)
        rates[size] = per_s * min(N, longest)
        found[size] = Figure(rates[size], f"{per_s:,.0f} texts/s")
    return {**found, "best": max(rates.values())}


def over_http(manifest: contract.Manifest, seconds: float, server: Server) -> Figures:
    """Send token ids, no two texts equal, and get base64. Return the tokens per second; refused requests are not counted."""
    length, random = min(HTTP_TOKENS, manifest.limits.max_tokens), np.random.default_rng(0)
    count = round(_MOST_PER_S * max(seconds, 1))
    ids = random.integers(0, manifest.limits.vocab_size, (count, HTTP_TEXTS, length))
    asked = {"model": manifest.name, "encoding_format": "base64"}
    bodies = [json.dumps({**asked, "input": rows.tolist()}) for rows in ids]
    load = wrk.run(server.url + server.path, bodies, connections=CONNECTIONS, seconds=seconds)
    answered = (load.requests - load.status_errors) / load.duration_s
    return {"tokens": Figure(answered * HTTP_TEXTS * length, f"{load.status_errors} requests refused")}
