"""Computes grammar masks on separate threads while the graph runs, so that a slow grammar delays only its own runs."""

import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from service.generation.sampling.grammar import Matcher, Words
from service.generation.sequence import Sequence

WAIT_S: Final = 0.005  # longest wait for all masks of a step, in seconds: the longest delay that grammars cause for other runs
_THREADS = max(2, min(4, (os.cpu_count() or 1) // 2))  # threads that compute masks at the same time; the library releases the GIL


class Masks:
    """The grammar masks of one engine's runs, used by the engine's thread only. Call `begin` when a run's grammar has advanced, and `late`
    before the next draw.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._pool = ThreadPoolExecutor(_THREADS, "mask")  # the first thread starts with the first mask

    def begin(self, sequence: Sequence) -> None:
        """Start computing the mask of this run's next token, if it has a grammar. Do not use its matcher until the mask is done."""
        if sequence.matcher is not None:
            sequence.mask = self._pool.submit(_mask_of, sequence.matcher, self._words)

    def late(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Wait up to WAIT_S for the masks, and return the sequences whose masks are not ready."""
        late = [sequence for sequence in sequences if sequence.mask is not None and not sequence.mask.done()]
        if not late:
            return late
        wait([sequence.mask for sequence in late if sequence.mask is not None], WAIT_S)
        return [sequence for sequence in late if not is_there(sequence)]

    def wait_for_one(self, sequences: Iterable[Sequence]) -> None:
        """Wait up to WAIT_S until any of these masks is ready. Call it if no run can take part in a step."""
        wait([sequence.mask for sequence in sequences if sequence.mask is not None], WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Cancel the computations that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def is_there(sequence: Sequence) -> bool:
    """Return whether the run's next token can be drawn: its mask is ready, or it needs no mask."""
    return sequence.mask is None or sequence.mask.done()


def _mask_of(matcher: Matcher, words: int) -> Words:
    mask = np.zeros(words, np.int32)
    matcher.mask(mask)
    return mask
