"""Sparse vectors: the indices of the numbers above 0, ascending, with these numbers.

Between engine, cache and pools, a sparse vector is one int32 array (2, n): the indices, and the bits of the float32 weights.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime.onnx import Array

MOST_WEIGHTS = 4096  # of a vector in an answer; the largest are kept. Trained models give some hundreds

Packed = NDArray[Any]  # (2, n) int32
Indices = NDArray[np.int32]


def of_weights(weights: Array) -> Packed:
    """Return the sparse vector of a row of weights (V,), none below 0."""
    indices = np.flatnonzero(weights).astype(np.int32)
    return packed(indices, weights[indices])


def of_tokens(ids: Sequence[int], weights: Array, ignored_ids: Collection[int]) -> Packed:
    """Return the sparse vector that has at each token id the largest of the weights (N,) of its tokens."""
    largest: dict[int, float] = {}
    for token_id, weight in zip(ids, weights.tolist(), strict=True):
        if weight > largest.get(token_id, 0.0) and token_id not in ignored_ids:
            largest[token_id] = weight
    indices = np.array(sorted(largest), np.int32)
    return packed(indices, np.array([largest[at] for at in indices.tolist()], np.float32))


def packed(indices: Indices, weights: Array) -> Packed:
    return np.stack((indices, weights.astype(np.float32, copy=False).view(np.int32)))


def unpacked(vector: Packed) -> tuple[Indices, Array]:
    """Return the indices and the weights of a sparse vector."""
    return vector[0], vector[1].view(np.float32)


def cut(vector: Packed, *, top_k: int | None = None, min_weight: float = 0.0) -> Packed:
    """Return the vector with its `top_k` largest weights (None: `MOST_WEIGHTS`), of equal ones those of the lower indices, and only weights
    of at least `min_weight`."""
    indices, weights = unpacked(vector)
    kept = weights >= min_weight
    indices, weights = indices[kept], weights[kept]
    if (top_k := top_k or MOST_WEIGHTS) < len(indices):
        best = np.sort(np.argsort(-weights, kind="stable")[:top_k])
        indices, weights = indices[best], weights[best]
    return packed(indices, weights)


class QueryTable:
    """The weight of each token id of a query, in a file that is mapped into memory. So a query needs no graph (arXiv 2411.04403)."""

    def __init__(self, file: Path, size: int) -> None:
        """Raises BundleError unless the file has `size` little-endian float32 numbers."""
        if (found := file.stat().st_size) != 4 * size:
            raise contract.BundleError(f"{file} has {found} bytes, and {size} weights need {4 * size}. Export the bundle again.")
        self._weights = np.memmap(file, "<f4", "r")

    def vector(self, ids: Collection[int]) -> Packed:
        """Return the sparse vector of a query with these distinct tokens."""
        indices = np.array(sorted(each for each in ids if each < len(self._weights)), np.int32)
        weights = np.asarray(self._weights[indices])
        return packed(indices[weights > 0], weights[weights > 0])


def dot(one: Packed, other: Packed) -> float:
    """Return the dot product of two sparse vectors, in float64."""
    (indices, weights), (others, other_weights) = unpacked(one), unpacked(other)
    _, here, there = np.intersect1d(indices, others, assume_unique=True, return_indices=True)
    return float(weights[here].astype(np.float64) @ other_weights[there].astype(np.float64))
