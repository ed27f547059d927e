"""Log-probabilities of a prompt's tokens, kept as arrays until they are written.

As Python objects, 20 alternatives of 20,000 tokens are 50 MB, and the engine's thread would have to make them between two steps.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from service.generation.request import TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Log-probabilities of M tokens with K alternatives each, the likeliest first."""

    token_ids: NDArray[np.int32]  # (M,)
    logprobs: NDArray[np.float64]  # (M,)
    ranks: NDArray[np.int32]  # (M,)
    top_ids: NDArray[np.int32]  # (M, K)
    top_distances: NDArray[np.float32]  # (M, K) below the largest logit
    totals: NDArray[np.float64]  # (M,): an alternative's log-probability is -distance - total

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, at: int) -> TokenLogprob:
        total = float(self.totals[at])
        alternatives = zip(self.top_ids[at].tolist(), self.top_distances[at].tolist(), strict=True)
        top = tuple([(token_id, -distance - total) for token_id, distance in alternatives if distance < math.inf])
        return TokenLogprob(int(self.token_ids[at]), float(self.logprobs[at]), top, int(self.ranks[at]))

    def __iter__(self) -> Iterator[TokenLogprob]:
        return (self[at] for at in range(len(self)))


Part = Told | Sequence[TokenLogprob | None]


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """One entry for each token, None for the first. Entries are made when they are read."""

    def __init__(self, *parts: Part) -> None:
        self._parts: list[Part] = []
        self._ends: list[int] = []  # the number of entries up to the end of each part
        for part in parts:
            self.extend(part)

    def extend(self, part: Part) -> None:
        """Append a part, which is not changed and may be shared."""
        if isinstance(part, PromptLogprobs):
            for each in list(part._parts):
                self.extend(each)
        elif len(part):
            self._parts.append(part)
            self._ends.append(len(self) + len(part))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        for part in self._parts:
            yield from part

    @overload
    def __getitem__(self, at: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprob | None]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        number = bisect_right(self._ends, at)
        return self._parts[number][at - (self._ends[number - 1] if number else 0)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
