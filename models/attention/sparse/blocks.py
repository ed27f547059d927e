"""Tokens in blocks, in which attentions with a fixed sparse pattern are computed, so that no N x N matrix is formed.

N is filled up to n blocks of C tokens with zeros, and what is filled up is no key. A query's block meets a span of keys: blocks before it,
itself, blocks after it. The pattern is exact: inside a span, a mask says which pairs meet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def in_blocks(x: Tensor, C: int, *, spare: int = 0) -> Tensor:
    """(B, H, N, D_k) -> (B, H, n, C, D_k), n = ceil(N / C) + spare.

    One spare block keeps n above 1 where n is an axis of a product: an exporter takes an axis of size 1 for a constant.
    """
    n = (x.shape[2] + C - 1) // C + spare
    return F.pad(x, (0, 0, 0, n * C - x.shape[2])).unflatten(2, (-1, C))


def out_of_blocks(x: Tensor, N: int) -> Tensor:
    """(B, H, n, C, D_v) -> (B, H, N, D_v)."""
    return x.flatten(2, 3)[:, :, :N]


def spans(x: Tensor, n: int, C: int, *, before: int, after: int) -> Tensor:
    """Each of n blocks with its neighbours: (B, H, N, D_k) -> (B, H, n, (before + 1 + after) C, D_k). N may be other than the queries'."""
    x = F.pad(x, (0, 0, before * C, (n + after) * C - x.shape[2])).unflatten(2, (-1, C))  # (B, H, before + n + after, C, D_k)
    return torch.cat([x[:, :, s : s + n] for s in range(before + 1 + after)], dim=3)


def near(C: int, *, before: int, after: int, window: int, causal: bool) -> Tensor:
    """Which query of a block sees which key of its span, if they may be `window` apart: (C, (before + 1 + after) * C) bool."""
    gaps = torch.arange(C)[:, None] - torch.arange(-before * C, (1 + after) * C)  # i - j
    return (gaps >= 0) & (gaps <= window) if causal else gaps.abs() <= window


def keys_present(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """bool (B, N) or None for all -> (B, 1, N, 1), to be laid out as keys are."""
    return torch.ones_like(k[:, :1, :, :1], dtype=torch.bool) if key_mask is None else key_mask[:, None, :, None]
