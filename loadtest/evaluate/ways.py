"""The ways in which two texts can be compared by the vectors of a bundle. Each gives a matrix of scores (queries, documents)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from export import contract
from loadtest.evaluate.metrics import DEEPEST, best
from loadtest.evaluate.vectors import Vectors
from service.encoding import sparse, vectors
from service.encoding.space import space_of
from service.runtime.onnx import Array

Texts = Mapping[contract.Output, Vectors]  # the vectors of the queries, or of the documents, of each output
WEIGHTS: dict[contract.Output, float] = {"dense": 1.0, "sparse": 0.3, "multivector": 1.0}  # of hybrid: those of BGE-M3
RESCORED = 4 * DEEPEST  # so many documents that are nearest by their bits are compared again
LEAST_DIMENSIONS = 32
HYBRID = "hybrid"


@dataclass(frozen=True)
class Way:
    """A way to compare texts. `spaces`: the ids of the embedding spaces that are needed, as answers name them."""

    name: str
    spaces: tuple[str, ...]


def ways_of(manifest: contract.Manifest) -> list[Way]:
    """Return all ways that a bundle has, its vectors as they are first."""
    there = [output for output in WEIGHTS if output in manifest.outputs]
    spaces = {output: space_of(manifest, manifest.tensor_of(output)) for output in there}
    ways = []
    for output in there:
        ways.append(Way(output, (spaces[output],)))
        if output == "dense":
            ways += [Way(f"dense-{form}", (spaces[output],)) for form in ("int8", "binary", "binary-rescored")]
            for dimensions in (manifest.width // 2, manifest.width // 4):
                if dimensions >= LEAST_DIMENSIONS:
                    ways.append(Way(f"dense-{dimensions}", (space_of(manifest, contract.EMBEDDING, dimensions),)))
    return ways + ([Way(HYBRID, tuple(spaces.values()))] if len(there) > 1 else [])


def scores(manifest: contract.Manifest, queries: Texts, documents: Texts, weights: Mapping[str, float]) -> Iterator[tuple[str, Array]]:
    """Yield the name and the scores (Q, n) of each way. `weights` are those of the outputs in `hybrid`."""
    mixed: list[Array] = []
    for output, compare in _COMPARED.items():
        if output in manifest.outputs:
            found = compare(queries[output], documents[output])
            mixed.append(found * np.float32(weights[output]))
            if output == "multivector":  # a mean has the size of a cosine
                counts = np.array([len(matrix) for matrix in queries[output]], np.float32)
                mixed[-1] /= counts[:, None]
                found = found / counts[:, None] if manifest.multivector is not None and manifest.multivector.mean else found
            yield output, found
            if output == "dense":
                yield from _of_forms(manifest, np.stack([*queries[output]]), np.stack([*documents[output]]))
    if len(mixed) > 1:
        yield HYBRID, np.sum(mixed, axis=0)


def _of_forms(manifest: contract.Manifest, queries: Array, documents: Array) -> Iterator[tuple[str, Array]]:
    """Yield the scores of vectors (Q, D) and (n, D) in fewer bits, and in fewer dimensions."""
    both = queries, documents
    yield "dense-int8", _cosines(*(_each(lambda row: vectors.FORMS["int8"](row).astype(np.float32), rows) for rows in both))
    signs = [np.where(rows > 0, 1, -1).astype(np.float32) for rows in both]
    by_bits = signs[0] @ signs[1].T
    yield "dense-binary", by_bits
    again = queries @ signs[1].T
    for row, bits in zip(again, by_bits, strict=True):
        near = np.zeros(len(row), bool)
        near[best(bits, RESCORED)] = True
        row[~near] = -np.inf
    yield "dense-binary-rescored", again
    for dimensions in (manifest.width // 2, manifest.width // 4):
        if dimensions >= LEAST_DIMENSIONS:
            shorter = (_each(partial(vectors.cut, dimensions=dimensions, normalize=True), rows) for rows in both)
            yield f"dense-{dimensions}", _cosines(*shorter)


def _each(change: Callable[[Array], Array], rows: Array) -> Array:
    return np.stack([change(row) for row in rows])


def _cosines(queries: Array, documents: Array) -> Array:
    found: Array = _unit(queries) @ _unit(documents).T
    return found


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
    return unit


def _dense(queries: Vectors, documents: Vectors) -> Array:
    return _cosines(np.stack([*queries]), np.stack([*documents]))


def _sparse(queries: Vectors, documents: Vectors) -> Array:
    """Return the dot products of sparse vectors."""
    unpacked = [sparse.unpacked(vector) for vector in queries]
    used, inverse = np.unique(np.concatenate([indices for indices, _ in unpacked]), return_inverse=True)
    by_index, first = np.zeros((len(used), len(queries)), np.float32), 0  # a row for each index that a query has
    for at, (indices, weights) in enumerate(unpacked):
        by_index[inverse[first : first + len(indices)], at] = weights
        first += len(indices)
    found = np.zeros((len(queries), len(documents)), np.float32)
    for at, (indices, weights) in enumerate(map(sparse.unpacked, documents)):
        shared, here, there = np.intersect1d(used, indices, assume_unique=True, return_indices=True)
        if len(shared):
            found[:, at] = weights[there] @ by_index[here]
    return found


def _maxsim(queries: Vectors, documents: Vectors) -> Array:
    """Return the MaxSim of token matrices, as `maxsim` of `service/encoding/token_matrix.py` does for one pair."""
    matrices = [matrix.astype(np.float32) for matrix in queries]
    together, starts = np.concatenate(matrices), np.cumsum([0, *map(len, matrices[:-1])])
    found = np.zeros((len(queries), len(documents)), np.float32)
    for at, document in enumerate(documents):
        products = document.astype(np.float32) @ together.T
        found[:, at] = np.add.reduceat(products.max(axis=0), starts)
    return found


_COMPARED: dict[contract.Output, Callable[[Vectors, Vectors], Array]] = {"dense": _dense, "sparse": _sparse, "multivector": _maxsim}
