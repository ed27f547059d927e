"""How many texts a second the bare runtime makes of a bundle: no tokenizer, no HTTP, no queue. The line that a server is held against.

    python -m export.measure BUNDLE...

No torch in here: it runs wherever a bundle is served.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from export import contract
from export.checks.parity import Feed, open_graph

Clock = Callable[[], float]

SIZES = ((1, 16), (8, 16), (32, 16), (1, 128), (8, 64), (1, 512))
ROUNDS = 5  # the median of so many: a neighbour's burst of work spoils one or two


def bare_rate(bundle: Path, batch: int, tokens: int, threads: int, seconds: float = 1.0) -> float:
    """Texts a second of one caller that runs full batches of `tokens` tokens, one after the other. BundleError for a broken bundle."""
    manifest = contract.verify(bundle)
    session = open_graph(bundle / manifest.graph.file, threads=threads)
    names = [tensor.name for tensor in manifest.graph.inputs]
    return rate(session, random_feed(names, batch, tokens, manifest.limits.vocab_size), manifest.graph.outputs[0].name, seconds)


def rate(session: ort.InferenceSession, feed: Feed, output: str, seconds: float, clock: Clock = time.perf_counter) -> float:
    """Rows a second, the median of `ROUNDS` equal parts of `seconds`, after one run to warm up.

    With `time.thread_time` as the clock and a session of one thread: rows a second of a core's own time, whatever else runs on it.
    """
    session.run([output], feed)
    return statistics.median(_round(session, feed, output, seconds / ROUNDS, clock) for _ in range(ROUNDS))


def random_feed(names: list[str], batch: int, tokens: int, vocab_size: int) -> Feed:
    """Texts of exactly so many tokens each."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (batch, tokens))
    values = {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: np.ones_like(ids), contract.TOKEN_TYPE_IDS: np.zeros_like(ids)}
    return {name: values[name] for name in names}


def _round(session: ort.InferenceSession, feed: Feed, output: str, seconds: float, clock: Clock) -> float:
    runs, started = 0, clock()
    while (passed := clock() - started) < seconds:
        session.run([output], feed)
        runs += 1
    return runs * len(feed[contract.INPUT_IDS]) / passed


def main(bundles: list[str]) -> None:
    for bundle in map(Path, bundles):
        manifest = contract.verify(bundle)
        print(f"{manifest.name} {manifest.precision}, texts a second by batch x tokens, onnxruntime {ort.__version__}")
        longest = manifest.limits.max_tokens
        sizes = [size for size in SIZES if size[1] <= longest]
        print("  threads" + "".join(f"{f'{B} x {N}':>10}" for B, N in sizes))
        for threads in (1, 2):
            print(f"  {threads:7}" + "".join(f"{bare_rate(bundle, B, N, threads):10.0f}" for B, N in sizes))


if __name__ == "__main__":
    main(sys.argv[1:])
