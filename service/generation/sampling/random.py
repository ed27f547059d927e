"""Counter-based random numbers: the number for a (seed, position) is the same in any batch and any process.

Philox4x32-10: ten rounds of multiplication and XOR turn a counter into four random 32-bit words, under a key.
Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3; the constants are those of Random123.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # 32-bit words, stored in 64 bits

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)  # the multipliers of counter words 0 and 2
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)  # added to the key each round: golden ratio, sqrt(3) - 1
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL  # (rounds, 2, 1)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform random numbers in [0, 1) with 53 bits: (B,), (B,) -> (B,). The seed is the key, the position is the counter."""
    counter = np.zeros((4, len(positions)), np.uint64)
    counter[0], counter[1] = positions & _LOW, positions >> _HALF
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _HALF]))
    numbers: NDArray[np.float64] = ((words[1] << _HALF | words[0]) >> np.uint64(11)) * 2.0**-53
    return numbers


def philox(counter: Words, key: Words) -> Words:
    """Apply Philox4x32-10 to counters under keys: (4, B), (2, B) -> (4, B), words of 32 bits."""
    multiplied, added = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3: (2, B) each
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = (multiplied * _MULTIPLIERS)[::-1]  # reversed: the product of word 2 forms new words 0 and 1
        multiplied, added = product >> _HALF ^ added ^ round_key, product & _LOW
    return np.stack([multiplied, added], axis=1).reshape(4, -1)


class UniformCache:
    """Caches `uniform` for rows whose positions increase one by one: the numbers of BLOCK positions are computed together.

    A row's numbers are stored with their seed and first position, so they are recomputed if the row now belongs to another run.
    """

    BLOCK = 64  # positions
    LEAST = 32  # least number of positions for which `ahead` returns numbers

    def __init__(self, rows: int) -> None:
        self._numbers = np.zeros((rows, self.BLOCK))
        self._seeds = np.zeros(rows, np.uint64)
        self._firsts = np.zeros(rows, np.uint64)
        self._filled = np.zeros(rows, np.bool_)

    def ahead(self, rows: NDArray[np.intp], seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the numbers of each row at its seed for its position and those that follow: (R,) each -> (K, R), K from LEAST to BLOCK."""
        offsets = positions - self._firsts[rows]  # very large for an earlier position, because these integers have no sign
        stale = (offsets > self.BLOCK - self.LEAST) | (self._seeds[rows] != seeds) | ~self._filled[rows]
        if stale.any():
            self._fill(rows[stale], seeds[stale], positions[stale])
            offsets[stale] = 0
        following = np.arange(self.BLOCK - offsets.max(initial=0), dtype=np.uint64)
        numbers: NDArray[np.float64] = self._numbers[rows, following[:, None] + offsets]
        return numbers

    def _fill(self, rows: NDArray[np.intp], seeds: NDArray[np.uint64], firsts: NDArray[np.uint64]) -> None:
        following: NDArray[np.uint64] = np.arange(self.BLOCK, dtype=np.uint64)
        positions = firsts[:, None] + following  # (R, BLOCK)
        self._numbers[rows] = uniform(np.repeat(seeds, self.BLOCK), positions.ravel()).reshape(-1, self.BLOCK)
        self._seeds[rows], self._firsts[rows], self._filled[rows] = seeds, firsts, True
