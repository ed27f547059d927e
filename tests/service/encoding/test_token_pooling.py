"""MaxSim of token matrices by its definition, and token pooling against SciPy's Ward clusters, which sentence-transformers uses."""

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from service.encoding.token_matrix import maxsim
from service.encoding.token_pooling import MOST_POOLED, pool
from service.errors import InputTooLong
from service.runtime.onnx import Array


def token_matrix(n: int, width: int = 16, *, repeated: int = 0) -> Array:
    """Unit vectors, the last `repeated` of them equal to the first ones."""
    vectors = np.random.default_rng(n).standard_normal((n, width)).astype(np.float32)
    if repeated:
        vectors[-repeated:] = vectors[1 : 1 + repeated]
    unit: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def reference(matrix: Array, factor: float) -> Array:
    """HierarchicalTokenPooling of sentence-transformers 6, in NumPy and SciPy."""
    free = matrix[1:]
    count = max(int(len(free) // factor), 1)
    rows = [matrix[0], *free]
    if count < len(free):
        condensed = squareform(np.clip(1 - free @ free.T, 0, 2), checks=False)
        labels = fcluster(linkage(condensed, method="ward"), t=count, criterion="maxclust")
        rows = [matrix[0], *(free[labels == label].mean(axis=0) for label in np.unique(labels))]
    return np.array([row / np.linalg.norm(row) for row in rows])


@pytest.mark.parametrize("factor", [1, 1.5, 2, 4, 1000])
@pytest.mark.parametrize(("n", "repeated"), [(1, 0), (2, 0), (3, 0), (40, 0), (40, 9), (181, 0)])
def test_pooled_vectors_are_the_means_of_wards_clusters(n: int, repeated: int, factor: float) -> None:
    matrix = token_matrix(n, repeated=repeated)
    pooled = pool(matrix, factor)
    wanted = reference(matrix, factor)
    assert len(pooled) == len(wanted)
    assert (pooled @ wanted.T).max(axis=0) == pytest.approx(np.ones(len(wanted)), abs=1e-5)
    assert pooled[0] == pytest.approx(matrix[0], abs=1e-6), "the first vector stays, in its place"


def test_texts_of_too_many_tokens_are_not_pooled() -> None:
    with pytest.raises(InputTooLong, match=f"at most {MOST_POOLED + 1}"):
        pool(np.ones((MOST_POOLED + 2, 1), np.float32), 2)


@pytest.mark.parametrize(("n_query", "n_document"), [(1, 1), (3, 700), (32, 181), (400, 90)])
def test_maxsim_is_the_sum_of_the_largest_products_also_of_negative_ones(n_query: int, n_document: int) -> None:
    query, document = token_matrix(n_query, 128), token_matrix(n_document, 128)
    for other in (document, -np.abs(document)):
        one = np.abs(query) if other is not document else query
        products = one.astype(np.float64) @ other.astype(np.float64).T
        assert maxsim(one, other) == pytest.approx(products.max(axis=1).sum(), rel=1e-5)
