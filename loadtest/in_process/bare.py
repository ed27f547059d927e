"""The bare runtime: runs a bundle's graph in ONNX Runtime in its own process, without a server. Its speed is the upper bound for a server.

The session is opened as in the service (all cores, fp32 as exported, one output fetched). If the bundle has a graph for short texts, each
shape runs in the graph for its length.

The upper bound for texts of mixed lengths assumes no padding. At each length of LENGTHS, `cost_s` is the time of one text in the best of
the batches tried (1, 4, 16 and 32 texts of exactly that length, up to MAX_BATCH_TOKENS tokens). Between two lengths it is interpolated
linearly. `allowed_per_s` is the number of texts divided by the sum of their costs.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from export import contract
from loadtest.errors import LoadtestError

LENGTHS = (8, 16, 32, 64, 128, 192, 256)
BATCHES = (1, 4, 16, 32)
MAX_BATCH_TOKENS = 1024

Batch = tuple[int, int]  # (B, N): texts in a batch, tokens per text
Timing = dict[str, float]  # "texts_per_s" or "p50_ms" -> value


def measure(bundle: Path, shapes: Sequence[Batch], *, threads: int, seconds: float, spin: bool) -> dict[Batch, Timing]:
    """Run batches of every shape for `seconds` in a new process. Return texts per second and median milliseconds of each
    shape."""
    given = {"bundle": str(bundle), "shapes": shapes, "threads": threads, "seconds": seconds, "spin": spin}
    command = [sys.executable, "-m", "loadtest.in_process.bare", json.dumps(given)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise LoadtestError(f"the bare runtime failed: {ended.stderr.strip().splitlines()[-1:]}")
    return dict(zip(shapes, json.loads(ended.stdout), strict=True))


def shapes_for_mix(max_tokens: int) -> list[Batch]:
    lengths = [n for n in LENGTHS if n < max_tokens] + [min(max_tokens, LENGTHS[-1])]
    return [(b, n) for n in dict.fromkeys(lengths) for b in BATCHES if b * n <= MAX_BATCH_TOKENS]


def cost_s(texts_per_s: Mapping[Batch, float]) -> dict[int, float]:
    """Return the seconds of one text at each length, in the best batch tried."""
    return {n: min(1 / rate for (_, length), rate in texts_per_s.items() if length == n) for n in sorted({n for _, n in texts_per_s})}


def allowed_per_s(lengths: Iterable[int], costs: Mapping[int, float]) -> float:
    """Return the texts per second for texts of these lengths in tokens, if the runtime were never idle and no token were padding. `costs`
    has the seconds of one text by length."""
    lengths = list(lengths)
    return len(lengths) / sum(between(n, costs) for n in lengths)


def between(n: int, costs: Mapping[int, float]) -> float:
    """Return the cost of a text of n tokens, interpolated linearly between the nearest measured lengths. Below the shortest and above the
    longest measured length, the cost is taken as proportional to n."""
    known = sorted(costs)
    if n > known[-1]:
        return costs[known[-1]] * n / known[-1]
    return float(np.interp(n, [0, *known], [0.0, *(costs[length] for length in known)]))


def token_counts(bundle: Path, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens the model reads for each text: special tokens are included, and long texts are truncated."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundle / contract.TOKENIZER))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    max_tokens = contract.read_manifest(bundle).limits.max_tokens
    return [min(len(encoding.ids), max_tokens) for encoding in tokenizer.encode_batch(list(texts))]


def lowest_cosine(got: ArrayLike, want: ArrayLike) -> float:
    """Return the lowest cosine between two vectors with the same index, of two arrays (n, d)."""
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    return float((np.multiply(got, want).sum(axis=1) / lengths).min())


# The code that runs in the new process ---------------------------------------------------------------------------------------------------


def main(bundle: Path, shapes: Sequence[Batch], threads: int, seconds: float, spin: bool) -> None:
    manifest, sessions, results = contract.read_manifest(bundle), dict[str, Any](), []
    for b, n in shapes:
        if (file := manifest.graph_of(n).file) not in sessions:
            sessions[file] = open_session(bundle / file, threads, spin)
        feed = random_feed(sessions[file], b, n, manifest.limits.vocab_size)
        results.append(timed(sessions[file], feed, seconds=seconds))
    print(json.dumps(results))


def open_session(graph: Path, threads: int, spin: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def random_feed(session: Any, b: int, n: int, vocab_size: int) -> dict[str, Any]:
    """Return inputs for b texts of exactly n tokens."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (b, n))
    values = {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: np.ones_like(ids), contract.TOKEN_TYPE_IDS: np.zeros_like(ids)}
    return {tensor.name: values[tensor.name] for tensor in session.get_inputs()}


def timed(session: Any, feed: dict[str, Any], *, seconds: float) -> Timing:
    """Run the same batch repeatedly and time it, after three calls that are not counted."""
    for _ in range(3):
        session.run([contract.EMBEDDING], feed)
    spans: list[float] = []
    started = before = time.perf_counter()
    while before - started < seconds or not spans:  # one run at least, also on a machine too busy for more
        session.run([contract.EMBEDDING], feed)
        after = time.perf_counter()
        spans.append(after - before)
        before = after
    return {"texts_per_s": len(feed[contract.INPUT_IDS]) * len(spans) / (before - started), "p50_ms": statistics.median(spans) * 1000}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given.pop("bundle")), **given)
