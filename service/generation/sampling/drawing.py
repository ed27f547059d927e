"""Draws one token per row from its scores: softmax with temperature, truncation, then inversion of the CDF at a uniform random number.
(`graph.py` does the same without truncation.) Also finds the likeliest tokens, and the sums of log-probabilities.

Pure functions on R rows of V scores. A row's result is bit-identical in any batch, because every sum runs within its row, in an order that
depends on V alone. Scores may be -inf (never drawn); the maximum of every row, its peak, must be finite.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.scratch import DEPTH, Floats, padded, scratch
from service.generation.sampling.truncation import DEEPEST, Truncation, runs, truncate

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

_TOURNAMENT = 16  # scores in a group; the maxima of the groups give a lower bound of the k-th largest score
_FEW = 1024  # rows with at most this many candidates are sorted
_PIECE = 2**18  # number of scores (1 MB) that fit into a core's cache
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONES = np.ones((1, DEPTH), np.float32)
_BEHIND_ALL = np.uint64(0x7F800000_FFFFFFFF)  # sorts last: the key of a token at distance +inf, with the largest id


def pieces(rows: NDArray[np.intp], n_tokens: int) -> Iterator[NDArray[np.intp]]:
    """Split rows of a batch into groups whose scores fit into a core's cache."""
    size = max(1, _PIECE // n_tokens)
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def rows_of(scores: Floats, rows: NDArray[np.intp]) -> Floats:
    """Return the scores of these rows, (R,) ascending, R > 0. The result is a view if the rows are adjacent, else a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return scores[first : last + 1] if last - first + 1 == len(rows) else scores[rows]


def draw_truncated(scores: Floats, peaks: Floats, temperature: Floats, truncation: Truncation, uniforms: Doubles) -> Ids:
    """Draw a token from softmax(scores / temperature) after truncation in each row. Shapes: (R, V), (R,), (R,), (R,) for each parameter of
    `truncation`, (R,) -> token ids (R,).
    """
    token_ids = np.empty(len(scores), np.int64)
    bounds = _bounds(scores, peaks, temperature, truncation)
    few = np.isfinite(bounds)
    if few.any():
        few &= np.count_nonzero(scores >= bounds[:, None], axis=1) <= _FEW
    for rows in runs(few):
        distances, candidates = _sorted(*_above(scores[rows], peaks[rows], bounds[rows]))
        cumulative = np.cumsum(_truncated(distances, temperature[rows], truncation.of(rows)), axis=1, dtype=np.float64)
        choice = _place(cumulative, uniforms[rows] * cumulative[:, -1])
        token_ids[rows] = candidates[np.arange(len(choice)), choice]
    for rows in runs(~few):
        distances = np.subtract(peaks[rows, None], scores[rows])
        token_ids[rows] = _drawn_from(_truncated(distances, temperature[rows], truncation.of(rows)), uniforms[rows])
    return token_ids


def _truncated(distances: Floats, temperature: Floats, truncation: Truncation) -> Floats:
    """Return the weights of K tokens in each row after truncation; `distances` (R, K) are the differences between the peak and their
    scores. Shapes: (R, K), (R,), (R,) for each parameter of `truncation` -> (R, W), where W is K padded with zeros to a multiple of DEPTH.
    The next call overwrites the result.
    """
    n_rows, n_tokens = distances.shape
    shape = n_rows, padded(n_tokens)
    depths, table = scratch("depths", shape), scratch("weights", shape)
    depths[:, n_tokens:] = DEEPEST
    inner = depths[:, :n_tokens]
    np.abs(distances, out=inner)  # a peak of -0.0 gives distances of -0.0, which are large numbers if they are compared as integers
    if (temperature != 1).any():
        np.multiply(inner, (1 / temperature)[:, None], out=inner)
    np.minimum(inner.view(np.uint32), DEEPEST.view(np.uint32), out=inner.view(np.uint32))  # as integers: five times as fast
    np.exp(np.negative(depths, out=table), out=table)
    truncate(table, depths, truncation)
    return table


def log_totals(scores: Floats, peaks: Floats) -> Doubles:
    """Return the log of the sum of exp(scores - peak) of each row: (R, V), (R,) -> (R,)."""
    n_rows, n_tokens = scores.shape
    table = scratch("weights", (n_rows, padded(n_tokens)))
    table[:, n_tokens:] = 0
    weights = table[:, :n_tokens]
    np.exp(np.subtract(scores, peaks[:, None], out=weights), out=weights)
    return np.log(np.cumsum(_columns(table), axis=1, dtype=np.float64)[:, -1])


def largest(scores: Floats, peaks: Floats, k: Ids) -> tuple[Floats, Ids]:
    """Return the k largest scores of each row, as distances below the peak, and their token ids. Shapes: (R, V), (R,), (R,) -> (R, K), (R,
    K) with K >= max k. Entries are sorted by descending score, then by id. Each row has at least min(k, V) entries for its own k, and is
    padded with distance inf.
    """
    return _sorted(*_above(scores, peaks, _bounds_of_largest(_leaders(scores), k)))


def _drawn_from(table: Floats, uniforms: Doubles) -> Ids:
    """Draw a token from each row of weights: (R, W), (R,) -> (R,), W a multiple of DEPTH. Each row is treated as a table (DEPTH, W /
    DEPTH). First a column is drawn, then a token in this column, because a cumulative sum over V tokens would cost more than all other
    steps.
    """
    rows = np.arange(len(table))
    columns = np.cumsum(_columns(table), axis=1, dtype=np.float64)
    targets = uniforms * columns[:, -1]
    column = _place(columns, targets)
    rest = targets - np.where(column > 0, columns[rows, column - 1], 0)
    folded = table.reshape(len(table), DEPTH, -1)
    within = np.cumsum(folded[rows, :, column], axis=1, dtype=np.float64)  # (R, DEPTH)
    token_ids: Ids = _place(within, rest) * folded.shape[2] + column
    return token_ids


def _columns(weights: Floats) -> Floats:
    """Sum the columns of each row, seen as a table (DEPTH, W / DEPTH): (R, W) -> (R, W / DEPTH). A matrix product is four times as fast as
    `sum(axis=1)`.
    """
    folded = weights.reshape(len(weights), DEPTH, -1)
    sums: Floats = np.matmul(_ONES, folded)[:, 0]
    return sums


def _place(cumulative: Doubles, targets: Doubles) -> NDArray[np.intp]:
    """Return, for each row, the first index whose cumulative sum exceeds the row's target: (R, K), (R,) -> (R,).

    Rounding may raise a target to the row's total or beyond; it is clipped below the total, so no index of weight 0 is ever chosen.
    """
    targets = np.minimum(targets, np.nextafter(cumulative[:, -1], 0))
    place: NDArray[np.intp] = (cumulative <= targets[:, None]).sum(axis=1)
    return place


def _bounds(scores: Floats, peaks: Floats, temperature: Floats, truncation: Truncation) -> Floats:
    """Return, for each row, a lower bound of the scores that top_k and min_p keep, or -inf if neither gives a bound: (R,)."""
    top_k, top_p, min_p, _ = truncation
    bounds = np.full(len(scores), -np.inf, np.float32)
    limited = np.flatnonzero(top_k > 0)
    if limited.size:
        bounds[limited] = _bounds_of_largest(_leaders(rows_of(scores, limited)), top_k[limited])
    floor = np.flatnonzero((min_p > 0) & (top_p == 1))  # no bound if top_p < 1, because its sum includes tokens that min_p drops
    if floor.size:  # the bound is lowered by more than all rounding errors
        least = peaks[floor] + temperature[floor] * (np.log(min_p[floor]) - 1e-3) - 1e-5 * np.abs(peaks[floor])
        bounds[floor] = np.maximum(bounds[floor], least.astype(np.float32))
    return bounds


def _leaders(scores: Floats) -> Floats:
    """Return the maximum of each group of _TOURNAMENT scores, ascending: (R, V) -> (R, W), W about V / _TOURNAMENT. The k-th largest
    maximum is at most the row's k-th largest score."""
    n_rows, n_tokens = scores.shape
    width = n_tokens // _TOURNAMENT
    grouped = scores[:, : width * _TOURNAMENT].reshape(n_rows, _TOURNAMENT, width).max(axis=1)
    leaders = np.concatenate([grouped, scores[:, width * _TOURNAMENT :]], axis=1)
    leaders.sort(axis=1)
    return leaders


def _bounds_of_largest(leaders: Floats, k: Ids) -> Floats:
    """Return, for each row, a bound that at least k scores reach: (R, W), (R,) -> (R,). The bound is -inf if k = 0 or k > W."""
    width = leaders.shape[1]
    known = (k > 0) & (k <= width)
    place = width - np.where(known, k, 1)
    return np.where(known, leaders[np.arange(len(leaders)), place], np.float32(-np.inf))


def _above(scores: Floats, peaks: Floats, bounds: Floats) -> tuple[Floats, Ids, NDArray[np.intp]]:
    """Select the scores that reach the bounds: (R, V), (R,), (R,) -> distances below the peak and token ids, row after row in flat arrays,
    and the number of them in each row, (R,)."""
    n_rows, n_tokens = scores.shape
    if np.isneginf(bounds).all():
        return (peaks[:, None] - scores).ravel(), np.tile(np.arange(n_tokens), n_rows), np.full(n_rows, n_tokens)
    places = np.flatnonzero(scores >= bounds[:, None])
    sizes = np.diff(np.searchsorted(places, np.arange(n_rows + 1) * n_tokens))
    row = np.repeat(np.arange(n_rows), sizes)
    token_ids = places - row * n_tokens
    return peaks[row] - scores[row, token_ids], token_ids, sizes


def _sorted(distances: Floats, token_ids: Ids, sizes: NDArray[np.intp]) -> tuple[Floats, Ids]:
    """Sort the result of `_above` by distance, then id, in each row: (R, K) each, K the largest size, padded with distance inf.

    Distance and id are sorted as one integer, since the bits of non-negative floats have the same order as their values. A distance may be
    -0.0, if the peak is.
    """
    near = np.abs(distances).view(np.uint32).astype(np.uint64) << _HALF | token_ids.astype(np.uint64)
    if len(sizes) == 1:
        keys = near[None]
    else:
        rank = np.arange(len(token_ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        keys = np.full((len(sizes), sizes.max()), _BEHIND_ALL)
        keys[np.repeat(np.arange(len(sizes)), sizes), rank] = near
    keys.sort(axis=1)
    return (keys >> _HALF).astype(np.uint32).view(np.float32), (keys & _LOW).astype(np.int64)
