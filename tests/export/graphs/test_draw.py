"""The graph that draws tokens: the service has the file that this code writes, and it draws what the definition says."""

import numpy as np

from export.graphs.draw import BLOCK, FILE, draw_graph
from service.generation.sampling.graph import FIRST, GREEDY, Draws, draw
from tests.cases import in_one_test

LAST = np.nextafter(1.0, 0.0)


def test_the_service_has_the_graph_that_this_code_writes() -> None:
    assert FILE.read_bytes() == draw_graph().SerializeToString(), "run python -m export.graphs.draw"


def drawn(scores: np.ndarray, uniforms: np.ndarray, inverse_temperature: float = 1.0) -> np.ndarray:
    return draw(scores, np.full(len(scores), inverse_temperature, np.float32), uniforms)


@in_one_test("vocab", [1, 2, 6, 63, 64, 211, 4096, 4099])
@in_one_test("excluded", [0.0, 0.6])
def test_it_inverts_the_cumulative_distribution(vocab: int, excluded: float) -> None:
    random = np.random.default_rng(vocab)
    row = random.normal(0, 3, vocab).astype(np.float32)
    row[random.random(vocab) < excluded] = -np.inf
    row[vocab // 2] = 0
    up_to = np.cumsum(np.exp((row - row.max()).astype(np.float64)))
    uniforms = np.concatenate([[FIRST, LAST, 0.5], random.random(400)])
    ids = drawn(np.tile(row, (len(uniforms), 1)), uniforms)
    assert np.isfinite(row[ids]).all()
    below, above = np.where(ids > 0, up_to[ids - 1], 0) / up_to[-1], up_to[ids] / up_to[-1]
    assert (below - 1e-6 <= uniforms).all()
    assert (uniforms <= above + 1e-6).all()


def test_the_ends_of_blocks_never_give_a_token_of_weight_0() -> None:
    """Where a target lies at the end of a block, and the block's sums in both precisions differ."""
    blocks = np.random.default_rng(0).normal(0, 1, (6, BLOCK)).astype(np.float32)
    blocks[:, ::2] = blocks[:, -1] = blocks[2] = -np.inf
    sums = np.exp(blocks - blocks.max()).sum(axis=1)
    ends = np.cumsum(sums, dtype=np.float64)
    near = (ends[:-1, None] / ends[-1] + np.linspace(-3e-7, 3e-7, 601)).ravel()
    ids = drawn(np.tile(blocks.ravel(), (len(near), 1)), near)
    assert np.isfinite(blocks.ravel()[ids]).all()


def test_greedy_is_the_first_maximum() -> None:
    scores = np.random.default_rng(0).integers(-3, 4, (50, 200)).astype(np.float32)
    scores[0] = np.where(np.arange(200) % 2, np.float32(-0.0), np.float32(0.0))
    assert (drawn(scores, np.full(50, FIRST), float(GREEDY)) == scores.argmax(axis=1)).all()
    assert (drawn(-scores * 1e38, np.full(50, FIRST), float(GREEDY)) == (-scores).argmax(axis=1)).all()


@in_one_test("bad", [np.nan, np.inf])
def test_scores_that_are_not_finite_give_no_token(bad: float) -> None:
    scores = np.zeros((4, 100), np.float32)
    scores[1, 70], scores[2], scores[3, 1:] = bad, -np.inf, -np.inf
    assert drawn(scores, np.full(4, 0.295)).tolist() == [29, -1, -1, 0]


def test_a_bound_call_draws_from_what_the_arrays_have_then() -> None:
    draws = Draws.empty(2)
    call = draws.bound(np.zeros((2, 100), np.float32))
    call()
    assert draws.token_ids[:, 0].tolist() == [0, 0]
    draws.uniforms[:] = [[0.505], [0.995]]
    call()
    assert draws.token_ids[:, 0].tolist() == [50, 99]


@in_one_test("vocab", [211, 4096, 4098, 30_522, 50_257])
def test_a_row_has_the_same_bits_at_any_place(vocab: int) -> None:
    """Rows of most vocabularies begin anywhere in a cache line."""
    row = np.random.default_rng(vocab).normal(0, 3, vocab).astype(np.float32)
    totals = set[float]()
    for n_rows in (1, 2, 9):
        draws = Draws.empty(n_rows)
        draws.bound(np.tile(row, (n_rows, 1)))()
        totals |= set(draws.totals[:, 0].tolist())
    assert len(totals) == 1


@in_one_test("scale", [1e10, 1e30])
def test_large_scores_are_drawn_as_the_definition_says(scale: float) -> None:
    scores = (np.random.default_rng(0).permutation(300).astype(np.float32) * np.float32(scale))[None]
    for inverse_temperature in (float(GREEDY), 1e5, 1.0):
        assert drawn(scores, np.array([0.3]), inverse_temperature) == scores.argmax()
