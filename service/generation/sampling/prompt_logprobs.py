"""Log-probabilities of a prompt's tokens, stored as arrays until they are written to a response.

As Python objects, 20 alternatives for each of 20,000 tokens would take 50 MB, and the engine's thread would have to create these objects
between two steps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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

    def __iter__(self) -> Iterator[TokenLogprob]:
        for at, total in enumerate(self.totals.tolist()):
            alternatives = zip(self.top_ids[at].tolist(), self.top_distances[at].tolist(), strict=True)
            top = tuple([(token_id, -distance - total) for token_id, distance in alternatives if distance < math.inf])
            yield TokenLogprob(int(self.token_ids[at]), float(self.logprobs[at]), top, int(self.ranks[at]))


class PromptLogprobs:
    """The log-probabilities of a prompt: one entry for each token, None for the first. Entries are created when they are read."""

    def __init__(self, *parts: "Part") -> None:
        self.parts: list[Told | Sequence[TokenLogprob | None]] = []
        self._size = 0
        for part in parts:
            self.extend(part)

    def extend(self, part: "Part") -> None:
        """Append a part. Parts are never changed, so several objects may share one."""
        self.parts += part.parts if isinstance(part, PromptLogprobs) else [part]
        self._size += len(part)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        return chain.from_iterable(self.parts)


Part = Told | PromptLogprobs | Sequence[TokenLogprob | None]
