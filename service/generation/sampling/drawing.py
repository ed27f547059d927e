"""Draws one token per row from its scores: softmax with temperature, truncation, then inversion of the CDF at a uniform random number.

Pure functions on R rows of V scores. A row's result is bit-identical in any batch, because every sum runs within its row, in an order that
depends on V alone. Scores may be -inf (never drawn); the maximum of every row, its peak, must be finite.
"""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

_DEPTH = 64  # a row's weights are reshaped to (_DEPTH, W / _DEPTH), whose columns are summed first
_TOURNAMENT = 16  # scores in a group; the maxima of the groups give a lower bound of the k-th largest score
_PIECE = 2**18  # number of scores (1 MB) that fit into a core's cache
_FAINTEST = 16  # the nucleus search does not distinguish tokens less than 2**-16 as likely as the likeliest
_NARROW = 1024  # rows with at most this many candidates are sorted together in one batch
_BINS = 4096  # bins of the histogram of keys, for rows with more candidates
_DEEPEST = np.float32(128)  # largest distance below the peak; exp(-_DEEPEST) is 0
_LEAST = np.nextafter(0.0, 1.0)
_TINY = np.finfo(np.float32).tiny
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONES = np.ones((1, _DEPTH), np.float32)
_BEHIND_ALL = np.uint64(0x7F800000_FFFFFFFF)  # sorts last: the key of a token at distance +inf, with the largest id


class Truncation(NamedTuple):
    """The truncation parameters of each row, (R,) each, in the order of application. 0, 1, 0 and 1 truncate nothing."""

    top_k: Ids
    top_p: Doubles
    min_p: Doubles
    typical_p: Doubles

    def of(self, rows: NDArray[np.intp]) -> "Truncation":
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.typical_p[rows])


def pieces(rows: NDArray[np.intp], n_tokens: int) -> Iterator[NDArray[np.intp]]:
    """Split rows of a batch into groups whose scores fit into a core's cache."""
    size = max(1, _PIECE // n_tokens)
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def rows_of(scores: Floats, rows: NDArray[np.intp]) -> Floats:
    """Return the scores of these rows, (R,) ascending, R > 0. The result is a view if the rows are adjacent, else a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return scores[first : last + 1] if last - first + 1 == len(rows) else scores[rows]


def draw(scores: Floats, peaks: Floats, temperature: Floats, uniforms: Doubles) -> Ids:
    """Draw tokens from softmax(scores / temperature): (R, V), (R,), (R,), (R,) -> (R,)."""
    return _drawn_from(_weights(scores, peaks, temperature), uniforms)


def draw_truncated(scores: Floats, peaks: Floats, temperature: Floats, truncation: Truncation, uniforms: Doubles) -> Ids:
    """Draw tokens from softmax(scores / temperature) after truncation: (R, V), (R,), (R,), (R,) each, (R,) -> (R,)."""
    bounds, totals = _bounds(scores, peaks, temperature, truncation)
    narrow = np.count_nonzero(scores >= bounds[:, None], axis=1) <= _NARROW
    token_ids = np.empty(len(scores), np.int64)
    if narrow.any():
        rows = np.flatnonzero(narrow)
        own = truncation.of(rows)
        nearest, ids = _sorted(*_above(rows_of(scores, rows), peaks[rows], bounds[rows]))
        weights = np.exp(-(nearest / temperature[rows, None]).astype(np.float64))  # (R, K), largest first
        if (own.top_k > 0).any() or (own.top_p < 1).any() or (own.min_p > 0).any():
            weights *= _survivors(weights, totals[rows], own)
        _typical(weights, own.typical_p)
        cumulative = np.cumsum(weights, axis=1)
        choice, _ = _locate(cumulative, uniforms[rows] * cumulative[:, -1])
        token_ids[rows] = ids[np.arange(len(rows)), choice]
    for row in np.flatnonzero(~narrow).tolist():  # one by one: a row of many candidates would pad all others to its width
        one = slice(row, row + 1)
        table = _weights(scores[one], peaks[one], temperature[one])
        depths = np.minimum((peaks[row] - scores[row]) / temperature[row], _DEEPEST)
        truncate_unsorted(table[0, : len(depths)], depths, float(totals[row]), truncation.of(np.array([row])))
        token_ids[one] = _drawn_from(table, uniforms[one])
    return token_ids


def log_totals(scores: Floats, peaks: Floats) -> Doubles:
    """Return the log of the sum of exp(scores - peak) of each row: (R, V), (R,) -> (R,)."""
    return np.log(_totals(_weights(scores, peaks, np.ones_like(peaks))))


def largest(scores: Floats, peaks: Floats, k: Ids) -> tuple[Floats, Ids]:
    """Find the k largest scores of each row: (R, V), (R,), (R,) -> distances below the peak and token ids, (R, K) each, K >= max k. Order:
    descending score, then id. A row has at least its own k entries, or V, and is padded with distance inf."""
    return _sorted(*_above(scores, peaks, _bounds_of_largest(_leaders(scores), k)))


def _drawn_from(table: Floats, uniforms: Doubles) -> Ids:
    """Draw a token from each row of weights: (R, W), (R,) -> (R,), W a multiple of _DEPTH. First a column of the table (_DEPTH, W / _DEPTH)
    is drawn, then a token in it: a cumulative sum over V would cost more than all other steps."""
    columns = np.cumsum(_columns(table), axis=1, dtype=np.float64)
    column, rest = _locate(columns, uniforms * columns[:, -1])
    folded = table.reshape(len(table), _DEPTH, -1)
    within = np.cumsum(folded[np.arange(len(table)), :, column], axis=1, dtype=np.float64)  # (R, _DEPTH)
    depth, _ = _locate(within, rest)
    token_ids: Ids = depth * folded.shape[2] + column
    return token_ids


def _weights(scores: Floats, peaks: Floats, temperature: Floats) -> Floats:
    """Compute exp((scores - peak) / temperature), (R, W), padded with 0 to a multiple W of _DEPTH. The next call overwrites the result."""
    n_rows, n_tokens = scores.shape
    table = _scratch(n_rows * _DEPTH * -(-n_tokens // _DEPTH)).reshape(n_rows, -1)
    table[:, n_tokens:] = 0
    weights = table[:, :n_tokens]
    np.subtract(scores, peaks[:, None], out=weights)
    if (temperature != 1).any():
        np.multiply(weights, (1 / temperature)[:, None], out=weights)
    np.exp(weights, out=weights)
    return table


_kept = threading.local()


def _scratch(size: int) -> Floats:
    """Return this thread's buffer of `size` floats. A new buffer for every draw would cost as much in page faults as all the rest."""
    table: Floats | None = getattr(_kept, "table", None)
    if table is None or table.size < size:
        table = _kept.table = np.empty(size, np.float32)
    return table[:size]


def _columns(weights: Floats) -> Floats:
    """Sum the columns of each row's table: (R, W) -> (R, W / _DEPTH). A matrix product is four times as fast as `sum(axis=1)`."""
    folded = weights.reshape(len(weights), _DEPTH, -1)
    sums: Floats = np.matmul(_ONES, folded)[:, 0]
    return sums


def _totals(weights: Floats) -> Doubles:
    """Sum each row: (R, W) -> (R,), W a multiple of _DEPTH."""
    return np.cumsum(_columns(weights), axis=1, dtype=np.float64)[:, -1]


def _locate(cumulative: Doubles, targets: Doubles) -> tuple[NDArray[np.intp], Doubles]:
    """Find the first index of each row whose cumulative sum exceeds the target, and by how much the target exceeds the sum before it:
    (R, K), (R,) -> (R,), (R,).

    Rounding may raise a target to the row's total or beyond; it is clipped below the total, so no index of weight 0 is ever chosen.
    """
    targets = np.minimum(targets, np.nextafter(cumulative[:, -1], 0))
    place = (cumulative <= targets[:, None]).sum(axis=1)
    before = np.where(place > 0, cumulative[np.arange(len(place)), place - 1], 0)
    return place, targets - before


def _bounds(scores: Floats, peaks: Floats, temperature: Floats, truncation: Truncation) -> tuple[Floats, Doubles]:
    """Return a lower bound of the scores that survive truncation (R,), so that fewer are sorted, and each row's total weight where top_p
    needs it, else 0."""
    top_k, top_p, min_p, _ = truncation
    bounds = np.full(len(scores), -np.inf, np.float32)
    totals = np.zeros(len(scores))
    limited = np.flatnonzero(top_k > 0)
    if limited.size:
        bounds[limited] = _bounds_of_largest(_leaders(rows_of(scores, limited)), top_k[limited])
    nucleus = np.flatnonzero((top_k == 0) & (top_p < 1))
    if nucleus.size:
        weights = _weights(rows_of(scores, nucleus), peaks[nucleus], temperature[nucleus])
        totals[nucleus] = _totals(weights)
        lightest = _lightest_within(weights, top_p[nucleus] * totals[nucleus])
        bounds[nucleus] = _score_of(lightest, peaks[nucleus], temperature[nucleus])
    # Not with top_k: then min_p must not be applied first, because top_p counts the tokens that min_p drops.
    floor = np.flatnonzero((top_k == 0) & (min_p > 0))
    if floor.size:
        bounds[floor] = np.maximum(bounds[floor], _score_of(min_p[floor], peaks[floor], temperature[floor]))
    return bounds, totals


def _score_of(weight: Doubles, peaks: Floats, temperature: Floats) -> Floats:
    """Return a score whose weight is slightly below `weight`, by more than all rounding errors; -inf for weight 0."""
    with np.errstate(divide="ignore"):
        score = peaks + temperature * (np.log(weight) - 1e-3) - 1e-5 * np.abs(peaks)
    return score.astype(np.float32)


def _lightest_within(weights: Floats, mass: Doubles) -> Doubles:
    """Find the largest power of two such that the weights that reach it sum to `mass` or more, 0 if only 2**-_FAINTEST or less suffices:
    (R, W) weights of at most 1, (R,) -> (R,)."""
    low, high = np.zeros(len(weights), np.int64), np.full(len(weights), _FAINTEST)  # exponents: at `low` the sum is too small
    while (low + 1 < high).any():
        middle = (low + high) // 2
        covered = _totals(weights * (weights >= np.ldexp(np.float32(1), -middle)[:, None])) >= mass
        low, high = np.where(covered, low, middle), np.where(covered, middle, high)
    return np.where(high < _FAINTEST, np.ldexp(1.0, -high), 0.0)


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
    """Return a bound that at least k scores of the row reach: (R, W), (R,) -> (R,); -inf if k = 0 or k > W."""
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

    Distance and id are sorted as one integer, since the bits of non-negative floats have the same order as their values.
    """
    near = distances.view(np.uint32).astype(np.uint64) << _HALF | token_ids.astype(np.uint64)
    if len(sizes) == 1:
        keys = near[None]
    else:
        rank = np.arange(len(token_ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        keys = np.full((len(sizes), sizes.max()), _BEHIND_ALL)
        keys[np.repeat(np.arange(len(sizes)), sizes), rank] = near
    keys.sort(axis=1)
    return (keys >> _HALF).astype(np.uint32).view(np.float32), (keys & _LOW).astype(np.int64)


def _survivors(weights: Doubles, totals: Doubles, truncation: Truncation) -> NDArray[np.bool_]:
    """Return the mask of the weights (R, K), largest first, that top_k, top_p and min_p keep: a non-empty prefix of each row."""
    top_k, top_p, min_p, _ = truncation
    kept: NDArray[np.bool_] = (np.arange(weights.shape[1]) < top_k[:, None]) | (top_k == 0)[:, None]
    cumulative = np.cumsum(weights * kept, axis=1)
    mass = top_p * np.where(totals > 0, totals, cumulative[:, -1])
    kept[:, 1:] &= (cumulative[:, :-1] < mass[:, None]) | (top_p == 1)[:, None]
    kept &= weights >= min_p[:, None] * weights[:, :1]
    return kept


def _typical(weights: Doubles, typical_p: Doubles) -> None:
    """Set to 0, in place, all weights but those whose surprise is nearest to the entropy and that sum to `typical_p`.

    Meister, Pimentel, Wiher, Cotterell 2023, "Locally typical sampling", arXiv:2202.00666.
    """
    (rows,) = np.nonzero(typical_p < 1)
    if not rows.size:
        return
    p = weights[rows] / np.cumsum(weights[rows], axis=1)[:, -1:]
    surprise = -np.log(np.where(p > 0, p, 1))
    entropy = np.cumsum(p * surprise, axis=1)[:, -1:]
    distance = np.where(p > 0, np.abs(surprise - entropy), np.inf)
    order = np.argsort(distance, axis=1, kind="stable")
    mass_before = np.cumsum(np.take_along_axis(p, order, axis=1), axis=1)[:, :-1]
    dropped = np.zeros(p.shape, np.bool_)
    np.put_along_axis(dropped, order[:, 1:], mass_before >= typical_p[rows, None], axis=1)
    weights[rows] = np.where(dropped, 0, weights[rows])


def truncate_unsorted(weights: Floats, depths: Floats, total: float, truncation: Truncation) -> None:
    """Set to 0, in place, the weights of one row that truncation drops. Weights and `depths` (distances below the peak, divided by the
    temperature) are (V,), by token id.

    The result is that of `_survivors` and `_typical`, but without sorting, which takes up to 10 ms for a large vocabulary.
    """
    top_k, (top_p, min_p, typical_p) = int(truncation.top_k[0]), (float(each[0]) for each in truncation[1:])
    if 0 < top_k < len(depths):
        last = np.partition(depths, top_k - 1)[top_k - 1]
        nearer = depths < last
        weights *= nearer | _the_first(depths == last, top_k - int(np.count_nonzero(nearer)))
    if top_p < 1:
        weights *= _nearest(depths, weights, top_p * (total or float(weights.sum(dtype=np.float64))))
    if min_p > 0:
        weights *= weights >= min_p
    if typical_p < 1:  # surprise is depth + a constant: distance to the entropy is distance to the mean depth
        mass = float(weights.sum(dtype=np.float64))
        mean = np.float32((weights * depths).sum(dtype=np.float64) / mass)
        weights *= _nearest(np.abs(depths - mean), weights, typical_p * mass)


def _the_first(members: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """Keep only the first `count` True values of a mask: (V,) -> (V,)."""
    kept = np.zeros_like(members)
    kept[np.flatnonzero(members)[:count]] = True
    return kept


def _nearest(keys: Floats, weights: Floats, mass: float) -> NDArray[np.bool_]:
    """Return the mask of the elements whose predecessors, in the order of keys then index, weigh less than `mass`: (V,), (V,) -> (V,). It
    always includes the first element, and the first of weight above 0.

    A histogram with bins of equal width replaces sorting. Only the bin in which the sum reaches `mass` is split further, by recursion.
    """
    mass = max(mass, _LEAST)
    low, high = keys.min(), keys.max()
    equal = high - low < _BINS * _TINY
    kept: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
    if equal or len(keys) <= _NARROW:
        order = np.arange(len(keys)) if equal else np.argsort(keys, kind="stable")
        before = np.cumsum(weights[order], dtype=np.float64)[:-1]
        kept[order[: 1 + np.searchsorted(before, mass)]] = True
        return kept
    bins = ((keys - low) * (_BINS / (high - low))).astype(np.intp)
    masses = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(masses, mass)), len(masses) - 1)
    np.less(bins, edge, out=kept)
    inside = np.flatnonzero(bins == edge)
    kept[inside] = _nearest(keys[inside], weights[inside], mass - (masses[edge - 1] if edge else 0))
    return kept
