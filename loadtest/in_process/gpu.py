"""The graphs for GPUs without HTTP: which provider computes them, whether they give what the CPU gives, and how fast they are.

    $ python -m loadtest.in_process.gpu encoder BUNDLE --provider cuda --seconds 3 --sizes 32x128 256x16
    {"assigned": {"MatMul": 6, ..}, "equal": 0.9999, "rates": {"32x128": {"texts_per_s": .., "tokens_per_s": ..}, ..}}
    $ python -m loadtest.in_process.gpu decoder BUNDLE --provider cuda --seconds 3 --sizes 1 64 1024

With the provider cpu the encoder's graph is its twin (`export/gpu/cpu_twin.py`), so that everything can be tried without a GPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from export import contract
from loadtest.errors import LoadtestError
from service.encoding.gpu.session import PackedSession
from service.errors import AttnserveError
from service.generation.gpu.sampling import SamplingSession
from service.generation.session import OnnxStepSession
from service.runtime.assignment import assigned
from service.runtime.onnx import CPU, CUDA, OnnxSession, check_install

PROVIDERS = {"cuda": CUDA, "cpu": CPU}
LEAST_COSINE = 0.999  # between vectors of the GPU and of the CPU, whose bundle may have weights in float32
LARGEST_LOSS = 0.05  # by how much the logit of a drawn token may be below the CPU's largest logit, as a share of that if it is above 1
COMPARED_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.in_process.gpu", description=__doc__)
    parser.add_argument("kind", choices=["encoder", "decoder"])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--provider", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size")
    parser.add_argument("--sizes", nargs="+", required=True, help="BxN for encoders, rows for decoders")
    given = parser.parse_args()
    try:
        check_install(given.provider)
        of_kind = of_encoder if given.kind == "encoder" else of_decoder
        print(json.dumps(of_kind(given.bundle, PROVIDERS[given.provider], given.sizes, given.seconds)))
    except AttnserveError as error:
        sys.exit(str(error))


def of_encoder(bundle: Path, provider: str, sizes: Sequence[str], seconds: float) -> dict[str, Any]:
    manifest, gpu = with_gpu_graph(bundle)
    shapes = [(int(B), int(N)) for B, N in (size.split("x") for size in sizes)]
    longest, output, random = manifest.limits.max_tokens, manifest.traits.output, np.random.default_rng(0)

    def texts(lengths: Sequence[int]) -> list[list[int]]:
        return [random.integers(0, manifest.limits.vocab_size, min(length, longest)).tolist() for length in lengths]

    with TemporaryDirectory() as folder:
        graph = bundle / gpu.graph.file
        if provider == CPU:
            from export.gpu.cpu_twin import write_cpu_twin  # loads `onnx`, which a GPU does not need

            write_cpu_twin(graph, graph := Path(folder) / "twin.onnx")
        most = max(B * min(N, longest) for B, N in shapes)
        session = PackedSession(graph, gpu, max_tokens=longest, most_tokens=most, provider=provider)
        ids = texts(random.integers(1, longest + 1, 20).tolist())
        served = OnnxSession(bundle, manifest, threads=1, provider="cpu")
        equal = lowest_cosine(session.run([output], ids, None)[output], served.run([output], ids, None)[output])
        if not equal >= LEAST_COSINE:
            raise LoadtestError(f"{bundle}: the lowest cosine to the CPU's vectors is {equal:.6f}, and {LEAST_COSINE} is needed")
        rates = {}
        for size, (B, N) in zip(sizes, shapes, strict=True):
            batch = texts([N] * B)
            calls_per_s = timed(lambda batch=batch: session.run([output], batch, None), seconds)  # type: ignore[misc]
            rates[size] = {"texts_per_s": B * calls_per_s, "tokens_per_s": B * min(N, longest) * calls_per_s}
        return {"assigned": operators(session), "equal": equal, "rates": rates}


def of_decoder(bundle: Path, provider: str, sizes: Sequence[str], seconds: float) -> dict[str, Any]:
    manifest, gpu = with_gpu_graph(bundle)
    assert manifest.decoder is not None
    rows = [int(size) for size in sizes]
    session = SamplingSession(bundle / gpu.graph.file, gpu, manifest.decoder, slots=max(rows), provider=provider)
    loss = largest_loss(session, OnnxStepSession(bundle, manifest, threads=1))
    if not loss <= LARGEST_LOSS:
        raise LoadtestError(
            f"{bundle}: a drawn token's logit is {loss:.3g} below the CPU's largest, and at most {LARGEST_LOSS} is accepted"
        )
    rates = {}
    for size, B in zip(sizes, rows, strict=True):
        for row in range(B):
            session.put(row, seed=row, temperature=0.8, top_p=0.95 if row % 2 else 1.0)
        tokens = np.zeros(B, np.int64)

        def step() -> None:
            nonlocal tokens
            tokens = np.maximum(session.step(tokens), 0)

        rates[size] = {"tokens_per_s": B * timed(step, seconds)}
    return {"assigned": operators(session), "equal": loss, "rates": rates}


def with_gpu_graph(bundle: Path) -> tuple[contract.Manifest, contract.GpuGraph]:
    manifest = contract.verify(bundle)
    if manifest.gpu_graph is None:
        raise LoadtestError(f"{bundle} has no graph for GPUs: export it with `attnserve export --gpu`")
    return manifest, manifest.gpu_graph


def lowest_cosine(got: Any, want: Any) -> float:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float(((got * want).sum(axis=1) / lengths).min())


def largest_loss(session: SamplingSession, served: OnnxStepSession) -> float:
    """Return by how much the logit of a greedily drawn token is below the CPU's largest logit. Both are fed the CPU's tokens."""
    session.put(0, seed=0, temperature=0)
    states, token, worst = [served.states(1), served.states(1)], np.zeros(1, np.int64), 0.0
    for position in range(COMPARED_TOKENS):
        logits = served.run(token[:, None], np.ones(1, np.int64), np.array([position]), np.zeros((1, 1), np.int64), states[0], states[1])[
            0, 0
        ]
        drawn = int(session.step(token)[0])
        largest = float(logits.max())
        worst = max(worst, (largest - float(logits[drawn]) if drawn >= 0 else np.inf) / max(1.0, largest))
        token = np.array([logits.argmax()])
        states.reverse()
    return worst


def operators(session: PackedSession | SamplingSession) -> dict[str, int]:
    """Return the number of nodes of each operator. All are on the session's provider, or it would not have been opened."""
    return {operator: n for (_, operator), n in sorted(assigned(session.session).items())}


def timed(call: Callable[[], object], seconds: float) -> float:
    """Return calls per second, after three that are not counted; the first may record a CUDA graph."""
    for _ in range(3):
        call()
    n, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not n:
        call()
        n += 1
    return n / elapsed if elapsed > 0 else 0.0


if __name__ == "__main__":
    main()
