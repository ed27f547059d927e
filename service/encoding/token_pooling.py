"""Fewer vectors for a document: similar token vectors are replaced by their mean (arXiv 2409.14683).

The clusters are those of HierarchicalTokenPooling in sentence-transformers 6: Ward's method on cosine distances, as SciPy's `linkage` and
`fcluster` find them. The first vector, usually of [CLS], stays.
"""

import math

import numpy as np
from numpy.typing import NDArray

from service.errors import InputTooLong
from service.runtime.onnx import Array

MOST_POOLED = 2_048  # vectors of a text; their distances take 8 bytes for each pair
PROTECTED = 1

Distances = NDArray[np.float64]


def pool(matrix: Array, factor: float) -> Array:
    """Return n / `factor` vectors of length 1 for a token matrix (n, D), in the order of the first token of each cluster.

    Raises InputTooLong if the matrix has more than `MOST_POOLED` vectors.
    """
    vectors: Array = matrix.astype(np.float32)
    free = vectors[PROTECTED:]
    if len(free) > MOST_POOLED:
        raise InputTooLong(
            f"the text has {len(matrix)} token vectors, and pool_factor takes at most {MOST_POOLED + PROTECTED}: shorten it, or leave "
            "pool_factor out",
            param="pool_factor",
        )
    n_clusters = max(int(len(free) // factor), 1)
    if n_clusters < len(free):
        labels = clusters(np.clip(1 - free @ free.T, 0, 2).astype(np.float64), n_clusters)
        members = labels[None, :] == np.arange(labels.max() + 1)[:, None]
        means = members.astype(np.float32) @ free / members.sum(axis=1, keepdims=True).astype(np.float32)
        vectors = np.concatenate((vectors[:PROTECTED], means))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True).astype(np.float32)
    pooled: Array = vectors / np.maximum(lengths, np.float32(1e-12))
    return pooled


def clusters(distances: Distances, n_clusters: int) -> NDArray[np.int64]:
    """Return the cluster of each of n items, counted from 0 in order of the first item: at most `n_clusters` clusters by Ward's method.

    `distances` (n, n) is overwritten. The closest clusters are found by chains of nearest neighbours, in O(n²).
    """
    n = len(distances)
    merges = sorted(_merges(distances), key=lambda merge: merge[0])
    limit = merges[n - n_clusters - 1][0]
    parent = list(range(n))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    for height, one, other in merges:
        if height <= limit:
            first, second = sorted((root(one), root(other)))
            parent[second] = first
    roots = [root(at) for at in range(n)]
    places = {at: place for place, at in enumerate(sorted(set(roots)))}
    return np.array([places[at] for at in roots], np.int64)


def _merges(distances: Distances) -> list[tuple[float, int, int]]:
    """Return the n - 1 merges of Ward's method, each as its height and an item of either cluster."""
    n = len(distances)
    np.fill_diagonal(distances, np.inf)
    sizes = np.ones(n)
    chain: list[int] = []
    merges = []
    for _ in range(n - 1):
        if not chain:
            chain.append(int(np.flatnonzero(sizes)[0]))
        while True:
            one = chain[-1]
            other = int(np.argmin(distances[one]))
            if len(chain) > 1 and distances[one, chain[-2]] <= distances[one, other]:
                other = chain[-2]  # of equally near ones the previous, so that the chain ends
                break
            chain.append(other)
        del chain[-2:]
        height = float(distances[one, other])
        merges.append((height, one, other))
        total = sizes + sizes[one] + sizes[other]
        between = (
            (sizes + sizes[one]) / total * distances[one] ** 2
            + (sizes + sizes[other]) / total * distances[other] ** 2
            - sizes / total * height**2
        )
        sizes[other] += sizes[one]
        sizes[one] = 0
        distances[one] = distances[:, one] = np.inf
        alive = (sizes > 0) & (np.arange(n) != other)
        new = np.where(alive, np.sqrt(np.maximum(between, 0)), math.inf)
        distances[other] = distances[:, other] = new
    return merges
