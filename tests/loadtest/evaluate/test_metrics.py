"""The metrics are those of trec_eval, which mteb uses, and of scipy, also with ties."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from loadtest.evaluate import metrics

DOCUMENTS = 150
OF_TREC_EVAL = {"ndcg@10": "ndcg_cut_10", "recall@10": "recall_10", "recall@100": "recall_100"}


@pytest.mark.parametrize("levels", [3, 40, 10**6], ids=["many ties", "ties", "few ties"])
def test_the_figures_of_queries_are_those_of_trec_eval(levels: int) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="needs pytrec_eval-terrier, of the extra `test`")
    random = np.random.default_rng(levels)
    ids = sorted((f"d{number}" for number in random.choice(10**6, DOCUMENTS, replace=False)), reverse=True)
    for judged in (1, 5, 140):
        scores = random.integers(0, levels, DOCUMENTS).astype(np.float32) / levels
        places = random.choice(DOCUMENTS, judged, replace=False)
        relevance = {int(at): int(grade) for at, grade in zip(places, random.integers(0, 4, judged), strict=True)}
        qrels = {"q": {ids[at]: grade for at, grade in relevance.items()}}
        run = {"q": {name: float(score) for name, score in zip(ids, scores, strict=True)}}
        theirs = pytrec_eval.RelevanceEvaluator(qrels, set(OF_TREC_EVAL.values())).evaluate(run)["q"]
        ranking = metrics.best(scores, metrics.DEEPEST)
        first_ten = {"q": {ids[at]: float(scores[at]) for at in ranking[:10]}}
        mrr = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(first_ten)["q"]["recip_rank"]
        wanted = {name: theirs[of_theirs] for name, of_theirs in OF_TREC_EVAL.items()} | {"mrr@10": mrr}
        assert metrics.of_query(ranking, relevance) == pytest.approx(wanted, abs=1e-6)


def test_the_correlation_of_pairs_is_scipys() -> None:
    random = np.random.default_rng(0)
    for levels in (3, 10**6):
        one, other = random.integers(0, levels, (2, 200))
        scores, wanted = one.astype(np.float32), (one + 2 * other).astype(np.float64)
        assert metrics.spearman(scores, wanted) == pytest.approx(spearmanr(scores, wanted).statistic, abs=1e-9)
    assert metrics.spearman(np.ones(5, np.float32), np.arange(5.0)) == 0


def test_the_best_are_ordered_by_score_then_by_position_without_the_excluded() -> None:
    scores = np.array([1, 3, -np.inf, 3, 2, 1], np.float32)
    assert metrics.best(scores, 2).tolist() == [1, 3]
    assert metrics.best(scores, 4).tolist() == [1, 3, 4, 0]
    assert metrics.best(scores, 9).tolist() == [1, 3, 4, 0, 5]
