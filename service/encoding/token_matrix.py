"""Token matrices: one vector for each token of a text that is compared, (n, D), as ColBERT has (arXiv 2004.12832)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from export import contract
from service.runtime.onnx import Array

# OpenBLAS computes a product of matrices of at most so many multiplications on one thread. More threads take ten times as long when the
# cores are busy, because they wait for each other at every product.
_ON_ONE_THREAD = 2**18
_FEWEST_ROWS = 32


def compared(ids: Sequence[int], multivector: contract.MultiVector, role: contract.RoleName) -> NDArray[np.bool_]:
    """Return which tokens of a text are compared, (N,) bool. Tokens that are skipped, such as punctuation, are skipped in documents only.

    If no token of a document would be left, none is skipped.
    """
    kept = np.ones(len(ids), bool)
    if role == "document" and multivector.skipped_ids:
        kept = ~np.isin(np.asarray(ids), multivector.skipped_ids)
    kept[: int(multivector.skips_first)] = False
    return kept if kept.any() else np.ones(len(ids), bool)


def matrix_of(array: Array, ids: Sequence[int], multivector: contract.MultiVector, role: contract.RoleName) -> Array:
    """Return the token matrix of a text from the vectors of all its tokens (N, D)."""
    return array[compared(ids, multivector, role)]


def maxsim(query: Array, document: Array) -> float:
    """Return the sum, over the vectors of a query (n, D), of the largest dot product with a vector of a document (m, D), in float32."""
    vectors = query.astype(np.float32).T
    largest: Array = np.full(len(query), -np.inf, np.float32)
    rows = max(_FEWEST_ROWS, _ON_ONE_THREAD // query.size)
    for first in range(0, len(document), rows):
        products: Array = document[first : first + rows].astype(np.float32) @ vectors
        largest = np.maximum(largest, products.max(axis=0))
    return float(largest.sum(dtype=np.float32))
