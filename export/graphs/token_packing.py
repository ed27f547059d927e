"""The tokens of a batch without its padding."""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenPacking(NamedTuple):
    """The mapping between the T packed tokens and the B * N padded positions."""

    position: Tensor  # (T,) int64, ascending: the padded position of each packed token
    row: Tensor  # (B * N,) int64, the index among the packed tokens for each padded position; padding repeats the previous index
    mask: Tensor  # (B, N) bool, True at tokens to which others attend

    @classmethod
    def of(cls, tokens: Tensor, t: Tensor, attended: Tensor | None = None) -> "TokenPacking":
        """Create the mapping from masks (B, N) of tokens and of those to which others attend (None: all), and t = 0 .. N - 1. The first
        position of every text is kept, also of an empty text.
        """
        kept = (tokens | (t == 0)).flatten()
        position = kept.nonzero().squeeze(1)
        torch._check(position.shape[0] >= 2)  # the exporter would otherwise make T the constant 1; the graph also runs with T = 1
        return cls(position, kept.long().cumsum(0) - 1, tokens if attended is None else attended)

    def pack(self, x: Tensor) -> Tensor:
        """Pack the tokens, without padding: (B, N, D) -> (T, D)."""
        return x.flatten(0, 1).index_select(0, self.position)

    def unpack(self, x: Tensor) -> Tensor:
        """Unpack the tokens to padded rows: (T, D) -> (B, N, D)."""
        return x.index_select(0, self.row).unflatten(0, self.mask.shape)
