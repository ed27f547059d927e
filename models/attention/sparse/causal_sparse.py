"""Causal sparse attention: a token sees near past tokens, and every l-th past token or the ends of blocks of l tokens.

The patterns are those of sparse.py, with j <= t. Child et al. 2019, arXiv:1904.10509, eqs. 2-4. The cache holds all tokens; with `union`
the t-th token reads about l + t / l of them.
"""

import torch
from torch import Tensor

from models.attention.layers.mechanism import Cost, Examples
from models.attention.sparse.pattern_cache import PatternCacheLayer, Slots, every, latest
from models.attention.sparse.sparse import SparseHeads, attend_sparse, heads_of_type_a


class CausalSparseAttention(SparseHeads, PatternCacheLayer):
    """Multi-head causal attention in pattern `union`, `strided` or `fixed`."""

    cost = Cost("O(N (k + N / k) D)", lambda N, s: 2 * N * (2 * s.stride + N / s.stride) * s.D)
    examples = Examples({"stride": 4}, {"stride": 32}, {"stride": 8})

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_sparse(q, k, v, mode=self.mode, stride=self.stride, n_summaries=self.n_summaries, causal=True)

    def slots_of_heads(self, t: Tensor, n_slots: int) -> list[tuple[slice, Slots]]:
        near, far = latest(t, self.stride), every(t, n_slots, self.stride)
        a = heads_of_type_a(self.n_heads)
        if self.mode == "union":
            once = far[1] & (far[0] < t.unsqueeze(-1) - self.stride)  # nearer tokens are in the window
            return [(slice(None), (torch.cat([near[0], far[0]], dim=-1), torch.cat([near[1], once], dim=-1)))]
        if self.mode == "strided":
            return [(slice(a), near), (slice(a, None), far)]
        return [(slice(a), _own_block(t, self.stride)), (slice(a, None), _ends(t, n_slots, self.stride, self.n_summaries))]


def _own_block(t: Tensor, stride: int) -> Slots:
    slots = (t // stride * stride).unsqueeze(-1) + torch.arange(stride, device=t.device)
    return slots, slots <= t.unsqueeze(-1)


def _ends(t: Tensor, n_slots: int, stride: int, c: int) -> Slots:
    begin = torch.arange(0, n_slots, stride, device=t.device)[:, None]
    slots = (begin + torch.arange(stride - c, stride, device=t.device)).flatten()
    return slots.expand(*t.shape, -1), slots <= t.unsqueeze(-1)
