"""The metrics of retrieval and of pairs, as trec_eval and mteb define them.

A run of Q queries over n documents is a matrix of scores (Q, n). Documents with equal scores are ordered by their position, so the caller
puts them in the order of trec_eval: by id, the largest first.
"""

import numpy as np
from numpy.typing import NDArray

from service.runtime.onnx import Array

Exact = NDArray[np.float64]
Ranking = NDArray[np.int64]  # positions of documents, the best first
RETRIEVAL = ("ndcg@10", "recall@10", "recall@100", "mrr@10")
PAIRS = ("spearman",)
DEEPEST = 100  # documents of a ranking that a metric reads


def best(scores: Array, most: int) -> Ranking:
    """Return the positions of the `most` best of the scores (n,), without those of minus infinity. Equal ones are ordered by position."""
    found = np.flatnonzero(scores > -np.inf)
    if most < len(found):
        least = np.partition(scores, len(scores) - most)[len(scores) - most]
        found = np.flatnonzero(scores >= least)
    return found[np.argsort(-scores[found], kind="stable")][:most]


def of_query(ranking: Ranking, relevance: dict[int, int]) -> dict[str, float]:
    """Return each of `RETRIEVAL` for one query. `relevance`: the judged grade of documents, by position; others have 0.

    The gain of a document is its grade (Järvelin and Kekäläinen 2002), and a document is relevant if its grade is above 0.
    """
    grades = np.array([max(relevance.get(at, 0), 0) for at in ranking.tolist()], np.float64)
    ideal = np.array(sorted((grade for grade in relevance.values() if grade > 0), reverse=True), np.float64)
    if not len(ideal):
        return dict.fromkeys(RETRIEVAL, 0.0)
    first = np.flatnonzero(grades[:10])
    return {
        "ndcg@10": _dcg(grades[:10]) / _dcg(ideal[:10]),
        "recall@10": float(np.count_nonzero(grades[:10])) / len(ideal),
        "recall@100": float(np.count_nonzero(grades[:100])) / len(ideal),
        "mrr@10": 1.0 / (first[0] + 1) if len(first) else 0.0,
    }


def spearman(scores: Array, wanted: Exact) -> float:
    """Return the rank correlation of two arrays (n,); equal numbers share the mean of their ranks. 0 if one of them is constant."""
    one, other = _ranks(scores), _ranks(wanted)
    one, other = one - one.mean(), other - other.mean()
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def _dcg(gains: Exact) -> float:
    return float((gains / np.log2(np.arange(len(gains)) + 2)).sum())


def _ranks(values: Array | Exact) -> Exact:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Exact = (ends - (counts - 1) / 2)[places]
    return ranks
