"""Log-probabilities of a prompt's tokens, stored as arrays until they are written to a response.

As Python objects, 20 alternatives for each of 20,000 tokens would take 50 MB, and the engine's thread would have to create these objects
between two steps.
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
    """The log-probabilities of M tokens, with K alternatives each, likeliest first."""

    token_ids: NDArray[np.int32]  # (M,)
    logprobs: NDArray[np.float64]  # (M,)
    ranks: NDArray[np.int32]  # (M,)
    top_ids: NDArray[np.int32]  # (M, K)
    top_distances: NDArray[np.float32]  # (M, K): largest logit minus the alternative's logit
    totals: NDArray[np.float64]  # (M,): log-probability of an alternative = -distance - total

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
    """The log-probabilities of a prompt: one entry for each token, None for the first. Entries are created when they are read."""

    def __init__(self, *parts: Part) -> None:
        self._parts: list[Part] = []
        self._ends: list[int] = []  # for each part, the total number of entries in it and all earlier parts
        for part in parts:
            self.extend(part)

    def extend(self, part: Part) -> None:
        """Append a part. Parts are never changed, so several objects may share one."""
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
