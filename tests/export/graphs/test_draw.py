"""The graph that draws tokens: the service has the file that this code writes, and it draws what the definition says."""

import numpy as np
import pytest

from export.graphs.draw import BLOCK, FILE, draw_graph
from service.generation.sampling.graph import GREEDY, bound, draw

LAST = np.nextafter(1.0, 0.0)


def test_the_service_has_the_graph_that_this_code_writes() -> None:
    assert FILE.read_bytes() == draw_graph().SerializeToString(), "run python -m export.graphs.draw"


def drawn(scores: np.ndarray, uniforms: np.ndarray, inverse_temperature: float = 1.0) -> np.ndarray:
    return draw(scores, np.full((len(scores), 1), inverse_temperature, np.float32), uniforms[:, None])[:, 0]


@pytest.mark.parametrize("vocab", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4099])
@pytest.mark.parametrize("excluded", [0.0, 0.6])
def test_it_inverts_the_cumulative_distribution(vocab: int, excluded: float) -> None:
    random = np.random.default_rng(vocab)
    row = random.normal(0, 3, vocab).astype(np.float32)
    row[random.random(vocab) < excluded] = -np.inf
    row[vocab // 2] = 0
    up_to = np.cumsum(np.exp((row - row.max()).astype(np.float64)))
    uniforms = np.concatenate([[0, LAST, 0.5], random.random(400)])
    ids = drawn(np.tile(row, (len(uniforms), 1)), uniforms)
    assert np.isfinite(row[ids]).all()
    below, above = np.where(ids > 0, up_to[ids - 1], 0) / up_to[-1], up_to[ids] / up_to[-1]
    assert (below - 1e-6 <= uniforms).all()
    assert (uniforms <= above + 1e-6).all()


def test_the_ends_of_blocks_never_give_a_token_of_weight_0() -> None:
    """Where a target lies at the edge of a block, and the block's sums in both precisions differ."""
    row = np.random.default_rng(0).normal(0, 1, 5 * BLOCK).astype(np.float32)
    row.reshape(5, BLOCK)[:, ::2] = -np.inf
    row.reshape(5, BLOCK)[2] = -np.inf
    weights = np.exp(row - row.max())
    edges = np.cumsum(weights.reshape(5, BLOCK).sum(axis=1), dtype=np.float64)
    near = (edges[:-1, None] / edges[-1] + np.linspace(-3e-7, 3e-7, 601)).ravel()
    ids = drawn(np.tile(row, (len(near), 1)), near)
    assert np.isfinite(row[ids]).all()


def test_the_largest_inverse_temperature_gives_the_first_maximum() -> None:
    scores = np.random.default_rng(0).integers(-3, 4, (50, 200)).astype(np.float32)
    scores[0] = np.where(np.arange(200) % 2, np.float32(-0.0), np.float32(0.0))
    assert (drawn(scores, np.zeros(50), float(GREEDY)) == scores.argmax(axis=1)).all()
    assert (drawn(-scores * 1e38, np.zeros(50), float(GREEDY)) == (-scores).argmax(axis=1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_give_no_token(bad: float) -> None:
    scores = np.zeros((4, 100), np.float32)
    scores[1, 70], scores[2], scores[3, 1:] = bad, -np.inf, -np.inf
    assert drawn(scores, np.full(4, 0.3)).tolist() == [30, -1, -1, 0]


def test_a_bound_call_draws_from_what_the_arrays_have_then() -> None:
    scores, cold, numbers, ids = np.zeros((2, 100), np.float32), np.ones((2, 1), np.float32), np.zeros((2, 1)), np.zeros((2, 1), np.int64)
    call = bound(scores, cold, numbers, ids)
    call()
    assert ids[:, 0].tolist() == [0, 0]
    numbers[:] = [[0.5], [0.999]]
    call()
    assert ids[:, 0].tolist() == [50, 99]
