"""Decides which tokens top_k, top_p, min_p and typical_p keep, for all rows of a batch at once.

A token's distance is the row's largest score minus its own. The distances are sorted without their token ids, which is several times as
fast. The sorted distances give the distance up to which tokens are kept, and the draw then passes over the row in the order of ids. A row's
result has the same bits in any batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.generation.sampling.scratch import DEPTH, Floats, padded, scratch

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

DEEPEST = np.float32(128)  # a larger depth (see `truncate`) is replaced by this one, because exp(-DEEPEST) is 0 in float32

_ONES = np.ones(DEPTH, np.float32)


class Truncation(NamedTuple):
    """The truncation parameters of R rows, an array (R,) for each parameter, in the order of application. The values 0, 1, 0 and 1 truncate
    nothing.
    """

    top_k: Integers
    top_p: Doubles
    min_p: Doubles
    typical_p: Doubles

    def of(self, rows: slice | NDArray[np.bool_]) -> "Truncation":
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.typical_p[rows])


def truncate(weights: Floats, depths: Floats, truncation: Truncation) -> None:
    """Set the weights of dropped tokens to 0, in place. `weights` and `depths` are (R, W), and W is a multiple of DEPTH.

    A token's depth is its row's largest score minus its own score, divided by the temperature. A depth is between 0 and DEEPEST and never
    -0.0, and its weight is exp(-depth). If not all tokens of equal depth fit into the kept tokens, the lowest ids are kept.
    """
    top_k, top_p, min_p, typical_p = truncation
    limited, nucleus = top_k > 0, (top_k == 0) & (top_p < 1)
    for rows in (*runs(limited), *runs(nucleus)):
        weights[rows] *= _likeliest(depths[rows], top_k[rows], top_p[rows])
    if (min_p > 0).any():
        weights *= weights >= min_p[:, None]
    for rows in runs(typical_p < 1):
        weights[rows] *= _typical(weights[rows], depths[rows], typical_p[rows])


def runs(chosen: NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the rows where the mask `chosen` (R,) is True, as slices of adjacent rows, because slicing an array makes no copy."""
    if chosen.all():
        yield slice(0, len(chosen))
    elif chosen.any():
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
        yield from map(slice, edges[::2], edges[1::2])


def _likeliest(depths: Floats, top_k: Integers, top_p: Doubles) -> NDArray[np.bool_]:
    """Return the mask of the tokens that top_k and top_p keep: (R, W), (R,), (R,) -> (R, W). Either all rows have a top_k > 0, or no row
    has.
    """
    n_rows, width = depths.shape
    ordered = scratch("ordered", depths.shape)
    np.copyto(ordered, depths)
    most = int(top_k.max())
    if 0 < most < width:
        ordered.partition(most, axis=1)
        ordered = ordered[:, : most + 1]  # one more depth, which shows whether the last kept depth occurs again among the dropped tokens
    ordered.view(np.uint32).sort(axis=1)  # sorts them as integers, because the bits of positive floats have the same order as their values
    counts = np.where(top_k > 0, np.minimum(top_k, width), width)
    if (top_p < 1).any():
        ordered_weights = scratch("ordered weights", (n_rows, padded(ordered.shape[1])))
        ordered_weights[:, ordered.shape[1] :] = 0
        np.exp(np.negative(ordered, out=ordered_weights[:, : ordered.shape[1]]), out=ordered_weights[:, : ordered.shape[1]])
        if most:
            ordered_weights *= np.arange(ordered_weights.shape[1]) < counts[:, None]
        counts = np.where(top_p < 1, np.minimum(counts, _count_to_mass(ordered_weights, top_p)), counts)
    return _smallest(depths, ordered, counts)


def _typical(weights: Floats, depths: Floats, typical_p: Doubles) -> NDArray[np.bool_]:
    """Return the mask of the tokens that typical_p keeps: the tokens whose surprise is nearest to the entropy, until they have `typical_p`
    of the row's weight: (R, W), (R, W), (R,) -> (R, W).

    Meister, Pimentel, Wiher, Cotterell 2023, "Locally typical sampling", arXiv:2202.00666. A token's surprise (-log p) is its depth plus a
    constant of the row, so the difference between surprise and entropy equals the difference between depth and mean depth.
    """
    signed, ordered, nearest = (scratch(name, depths.shape) for name in ("distances", "ordered", "ordered weights"))
    np.multiply(weights, depths, out=signed)
    mean = (_totals(signed) / _totals(weights)).astype(np.float32)[:, None]
    np.subtract(mean, depths, out=signed)
    np.copyto(signed, -DEEPEST, where=weights == 0)  # tokens that were dropped before, or whose weight is 0 in float32, are sorted last
    # Sorted by magnitude, as integers whose lowest bit is the sign: a sorted distance still has its weight, exp(signed - mean).
    bits, keys = signed.view(np.uint32), ordered.view(np.uint32)
    np.bitwise_or(bits << 1, bits >> 31, out=keys)
    keys.sort(axis=1)
    np.bitwise_or(keys >> 1, keys << 31, out=keys)
    np.exp(np.subtract(ordered, mean, out=nearest), out=nearest)
    return _smallest(np.abs(signed, out=signed), np.abs(ordered, out=ordered), _count_to_mass(nearest, typical_p))


def _totals(weights: Floats) -> Doubles:
    """Sum each row: (R, W) -> (R,)."""
    return np.cumsum(_block_sums(weights), axis=1, dtype=np.float64)[:, -1]


def _block_sums(weights: Floats) -> Floats:
    """Sum DEPTH adjacent weights: (R, W) -> (R, W / DEPTH)."""
    sums: Floats = np.matmul(weights.reshape(len(weights), -1, DEPTH), _ONES)
    return sums


def _count_to_mass(weights: Floats, fraction: Doubles) -> Integers:
    """Return, for each row, how many leading weights are needed for a sum of at least `fraction` of the row's sum, at least 1: (R, W), (R,)
    -> (R,). Summing blocks of DEPTH weights, and then the weights of one block, takes a tenth of the time of a cumulative sum over the row.
    """
    n_rows, width = weights.shape
    rows = np.arange(n_rows)
    sums = np.cumsum(_block_sums(weights), axis=1, dtype=np.float64)
    mass = (fraction * sums[:, -1])[:, None]
    block = (sums < mass).sum(axis=1)
    before = np.where(block > 0, sums[rows, block - 1], 0)[:, None]
    inside = before + np.cumsum(weights.reshape(n_rows, -1, DEPTH)[rows, block], axis=1, dtype=np.float64)
    counts: Integers = np.minimum(block * DEPTH + (inside < mass).sum(axis=1) + 1, width)
    return counts


def _smallest(values: Floats, ordered: Floats, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the mask of the `counts` smallest values of each row; among equal values, the lowest ids come first. `values` is (R, W),
    `ordered` (R, K) has the K smallest values in ascending order, and `counts` is (R,); the mask is (R, W).
    """
    rows, width = np.arange(len(values)), ordered.shape[1]
    last = ordered[rows, counts - 1]
    kept: NDArray[np.bool_] = values <= last[:, None]
    divided = (counts < width) & (ordered[rows, np.minimum(counts, width - 1)] == last) & (last < DEEPEST)
    for row in np.flatnonzero(divided).tolist():
        equal = np.flatnonzero(values[row] == last[row])
        kept[row, equal[counts[row] - np.searchsorted(ordered[row], last[row]) :]] = False
    return kept
