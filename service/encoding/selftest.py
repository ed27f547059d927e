"""The self-test of a bundle with its golden vectors before the bundle is served, and a measurement of the model's speed on this machine."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export import contract
from service.encoding import sparse
from service.errors import ServiceError
from service.runtime.onnx import Array, Session, in_a_line
from service.tokenization.texts import Cut, TextEncoder

_SHORT, _LONG, _MANY = 16, 64, 8  # tokens of a short input and of a long input, and inputs in a batch
_ANY_TOKEN = 0
# Tokens of the longest tested input, and seconds after which its run is stopped. A short time suffices, because a graph that does not
# accept so many tokens fails at once.
_LONGEST, _BEGIN_S = 2_048, 0.05
# A shorter call uses one core. ONNX Runtime's second thread would spin between operators for longer than it computes.
_SPREAD_S = 1e-3
_LEAST_RUNS, _MOST_RUNS, _ENOUGH_S = 3, 7, 0.1  # runs per measurement, and seconds after which no more runs are made


@dataclass(frozen=True)
class SelfTest:
    """How close this process's outputs are to the golden rows: the lowest cosine, or for logits the largest error. The other is None."""

    n_texts: int
    min_cosine: float | None
    max_abs_error: float | None


@dataclass(frozen=True)
class MeasuredRate:
    """The speed of one core. `run_cost_tokens` is the fixed cost of a call, expressed as the number of padding tokens that take the same
    time.
    """

    tokens_per_s: float
    run_cost_tokens: float
    spread_tokens: int  # a call with fewer tokens takes less than `_SPREAD_S`


def check_golden(bundle: Path, manifest: contract.Manifest, texts: TextEncoder, session: Session) -> SelfTest:
    """Compute the golden inputs, and every output of each graph. Raises BundleError if a row differs by more than the bundle allows."""
    golden = contract.read_golden(bundle, contract.Golden)
    bound = manifest.traits.golden_bound
    if getattr(golden, bound) is None:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has no {bound}, by which a bundle of kind {manifest.kind} is judged")
    _check_complete(bundle, manifest, golden)
    inputs = list(golden.texts) if golden.pairs is None else list(zip(golden.texts, golden.pairs, strict=True))
    ids, types = [], []
    for item in inputs:
        # A golden text may be empty, but `encode` refuses an empty text, so this text's ids come from the tokenizer directly.
        (encoded,) = texts.encode([item or texts.tokenizer.encode("").ids], cut=Cut())
        if isinstance(encoded, ServiceError):
            raise contract.BundleError(f"{bundle / contract.GOLDEN}: {item!r} cannot be encoded: {encoded}")
        ids.append(encoded.ids)
        types.append(encoded.type_ids or [0] * len(encoded.ids))
    named = [manifest.tensor_of(output) for output in manifest.outputs if output != "tokens"] or [manifest.traits.output]
    rows = [session.run(named, [one], [kind], alone=True) for one, kind in zip(ids, types, strict=True)]
    cosine, error = 1.0, 0.0
    if bound == "max_abs_error":
        got = [row[named[0]][0] for row in rows]
        error = float(np.abs(np.array([row[0] for row in got] if manifest.traits.per_token else got) - golden.outputs).max())
    else:
        numbered = enumerate(zip(ids, rows, strict=True))
        found = [(likeness, len(one)) for at, (one, row) in numbered for likeness in _cosines(manifest, golden, at, one, row)]
        cosine, tokens = min(found, key=lambda each: -math.inf if math.isnan(each[0]) else each[0])
        if golden.min_cosine is not None and not cosine >= golden.min_cosine:
            raise contract.BundleError(
                f"{bundle / manifest.graph_of(tokens).file}: self-test failed, lowest cosine to the golden vectors {cosine:.6f}, "
                f"needed {golden.min_cosine}"
            )
    if golden.max_abs_error is not None and not error <= golden.max_abs_error:
        raise contract.BundleError(f"{bundle}: self-test failed, a logit is off by {error:.3g}, allowed {golden.max_abs_error}")
    longest = {manifest.graph.file: manifest.limits.max_tokens}
    if (short := manifest.short_graph) is not None:
        longest[short.graph.file] = short.max_tokens
    for graph, max_tokens in longest.items():
        at = next((at for at, one in enumerate(ids) if manifest.graph_of(len(one)).file == graph), None)
        if at is None:
            raise contract.BundleError(f"{bundle / contract.GOLDEN} has no text that {graph} computes. Export the bundle again.")
        _check_served(bundle / graph, manifest, session, ids[at], types[at], max_tokens)
    by_cosine = bound == "min_cosine"
    return SelfTest(len(inputs), cosine if by_cosine else None, None if by_cosine else error)


def _check_complete(bundle: Path, manifest: contract.Manifest, golden: contract.Golden) -> None:
    """Raise BundleError if an output has no golden rows, or dense vectors and logits of another width than the manifest's."""
    needed = {
        "outputs": golden.outputs if "dense" in manifest.outputs or not manifest.traits.gives_vectors else True,
        "sparse": golden.sparse if manifest.sparse is not None else True,
        "matrices": golden.matrices if manifest.multivector is not None else True,
    }
    if missing := [name for name, rows in needed.items() if not rows]:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has no {missing[0]}, by which the bundle is judged. Export it again.")
    if manifest.sparse is not None and max(max(row.indices, default=0) for row in golden.sparse or ()) >= manifest.sparse.size:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has indices of sparse vectors beyond {manifest.sparse.size}")
    if golden.outputs and (width := len(golden.outputs[0])) != manifest.width:
        raise contract.BundleError(f"{bundle / contract.GOLDEN} has rows of {width} numbers, and the manifest width={manifest.width}")


def _cosines(manifest: contract.Manifest, golden: contract.Golden, at: int, ids: list[int], made: Mapping[str, Array]) -> Iterator[float]:
    """Yield the cosines to the golden rows of the text `at`: of each output, and of each token's vector. `ids` are the text's tokens,
    `made` its rows by this process.
    """
    if contract.EMBEDDING in made:
        yield _cosine(made[contract.EMBEDDING][0], golden.outputs[at])
    if (about := manifest.sparse) is not None and golden.sparse is not None:
        row, want = made[manifest.tensor_of("sparse")][0], golden.sparse[at]
        indices, weights = sparse.unpacked(sparse.of_tokens(ids, row, about.ignored_ids) if about.by_token else sparse.of_weights(row))
        got, wanted = np.zeros((2, about.size), np.float32)
        got[indices], wanted[list(want.indices)] = weights, want.weights
        if want.cut:
            got[wanted == 0] = 0
        yield _cosine(got, wanted)
    if golden.matrices is not None and at < len(golden.matrices):
        matrix, wanted = made[contract.MULTIVECTOR][0], np.array(golden.matrices[at], np.float32)
        yield from map(_cosine, matrix, wanted) if matrix.shape == wanted.shape else [0.0]


def _cosine(got: Array, want: Sequence[float] | Array) -> float:
    """Return the cosine of two vectors of one width, 1 if both are 0."""
    wanted = np.asarray(want, np.float32)
    return 1.0 if not got.any() and not wanted.any() else float(got @ wanted / (np.linalg.norm(got) * np.linalg.norm(wanted) + 1e-30))


def _check_served(graph: Path, manifest: contract.Manifest, session: Session, ids: list[int], types: list[int], max_tokens: int) -> None:
    """Compute every output of the graph for this input once, and begin to run the longest input of that graph. Raises BundleError if one of
    them fails.
    """
    sizes = {"B": 1, "N": len(ids)}
    named = [tensor.name for tensor in manifest.graph.outputs]
    made = session.run(named, [ids], [types], alone=True)
    for tensor in manifest.graph.outputs:
        got = made[tensor.name]
        wanted = tuple(sizes.get(str(axis), axis) for axis in tensor.shape)
        if got.shape != wanted:
            raise contract.BundleError(f"{graph}: self-test failed, {tensor.name} has the shape {got.shape}, and should have {wanted}")
        if not np.isfinite(got).all():
            raise contract.BundleError(f"{graph}: self-test failed, {tensor.name} has numbers that are not finite")
    length = min(max_tokens, _LONGEST)
    try:
        session.begin([_ANY_TOKEN] * length, within_s=_BEGIN_S)
    except Exception as error:  # ONNX Runtime's errors have no other base class
        raise contract.BundleError(
            f"{graph}: self-test failed, an input of {length} tokens fails, and the manifest allows {max_tokens}: {in_a_line(error)}"
        ) from error


def measure_rate(session: Session, output: str, max_tokens: int) -> MeasuredRate:
    """Measure the speed with three batches: one short input, many short inputs, and many short inputs with a longer one. The time of
    each batch is the median of a few runs.

    The third batch gives the cost of padding. In a graph that packs its tokens, padding costs time only in the attention.
    """
    short, long = min(_SHORT, max_tokens), min(_LONG, max_tokens)
    one, many = _median_s(session, output, [short]), _median_s(session, output, [short] * _MANY)
    per_token_s = max((many - one) / (short * (_MANY - 1)), 1e-9)
    run_cost_s = max(one - short * per_token_s, 0.0)
    ragged = [long] + [short] * (_MANY - 1)
    padding = max(long * len(ragged) - sum(ragged), 1)
    per_padding_s = (_median_s(session, output, ragged) - run_cost_s - sum(ragged) * per_token_s) / padding
    # A measured cost of padding near zero is noise, which would make inputs of very different lengths share a batch.
    price_s = min(max(per_padding_s, per_token_s / 10), per_token_s)
    return MeasuredRate(
        tokens_per_s=1 / per_token_s,
        run_cost_tokens=min(run_cost_s / price_s, 1024.0),
        spread_tokens=max(math.ceil((_SPREAD_S - run_cost_s) / per_token_s), 0),
    )


def _median_s(session: Session, output: str, lengths: list[int]) -> float:
    ids = [[1] * length for length in lengths]
    session.run([output], ids, None, alone=False)
    times: list[float] = []
    while len(times) < _LEAST_RUNS or (len(times) < _MOST_RUNS and sum(times) < _ENOUGH_S):
        times.append(_timed(session, output, ids))
    return statistics.median(times)


def _timed(session: Session, output: str, ids: list[list[int]]) -> float:
    started = time.perf_counter()
    session.run([output], ids, None, alone=False)
    return time.perf_counter() - started
