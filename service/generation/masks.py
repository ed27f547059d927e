"""The masks of grammars, computed on threads of their own while the graph runs, so that a slow grammar holds up its own runs alone."""

import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Final

import numpy as np

from service.generation.grammar import Matcher, Words
from service.generation.sequence import Sequence

WAIT_S: Final = 0.005  # for all masks of a step together: the time by which grammars may delay the runs that have none
_THREADS = max(2, min(4, (os.cpu_count() or 1) // 2))  # the library computes without the interpreter's lock


class Masks:
    """`begin` when a run's grammar has moved on, `late` before the next draw. For one engine's thread."""

    def __init__(self, vocab_size: int) -> None:
        self._words = -(-vocab_size // 32)
        self._pool = ThreadPoolExecutor(_THREADS, "mask")  # which starts no thread before the first mask

    def begin(self, sequence: Sequence) -> None:
        """Compute what may come next in this run, if it has a grammar. The matcher stays as it is until that is done."""
        if sequence.matcher is not None:
            sequence.mask = self._pool.submit(_mask_of, sequence.matcher, self._words)

    def late(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose masks are not there, WAIT_S from now at the latest."""
        late = [sequence for sequence in sequences if sequence.mask is not None and not sequence.mask.done()]
        if not late:
            return late
        wait([sequence.mask for sequence in late if sequence.mask is not None], WAIT_S)
        return [sequence for sequence in late if not is_there(sequence)]

    def wait_for_one(self, sequences: Iterable[Sequence]) -> None:
        """Until the first of their masks is there, for WAIT_S at most: where no run can take part in a step."""
        wait([sequence.mask for sequence in sequences if sequence.mask is not None], WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Masks that were not begun are never computed."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def is_there(sequence: Sequence) -> bool:
    """The run can draw its next token."""
    return sequence.mask is None or sequence.mask.done()


def _mask_of(matcher: Matcher, words: int) -> Words:
    mask = np.zeros(words, np.int32)
    matcher.mask(mask)
    return mask
