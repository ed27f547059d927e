"""Helpers that cut tokens into blocks, so that attention with a fixed sparse pattern needs no N x N matrix: each query block is compared
with a span of keys, some blocks before and after it, in which a mask selects the pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def in_blocks(x: Tensor, C: int, *, spare: int = 0) -> Tensor:
    """Cut x into blocks, filled up with zeros: (B, H, N, D_k) -> (B, H, n, C, D_k), n = ceil(N / C) + spare. A spare block keeps n above 1,
    because an exporter would treat an axis of size 1 as constant.
    """
    n = (x.shape[2] + C - 1) // C + spare
    return F.pad(x, (0, 0, 0, n * C - x.shape[2])).unflatten(2, (-1, C))


def out_of_blocks(x: Tensor, N: int) -> Tensor:
    """Join the blocks and remove the padding: (B, H, n, C, D_v) -> (B, H, N, D_v)."""
    return x.flatten(2, 3)[:, :, :N]


def spans(x: Tensor, n: int, C: int, *, before: int, after: int) -> Tensor:
    """Return n blocks of C tokens of x, each with `before` blocks before it and `after` blocks after it. Tokens outside x are zeros.

    x (B, H, N, D_k), for any N -> (B, H, n, (before + 1 + after) C, D_k).
    """
    x = F.pad(x, (0, 0, before * C, (n + after) * C - x.shape[2])).unflatten(2, (-1, C))  # (B, H, before + n + after, C, D_k)
    return torch.cat([x[:, :, s : s + n] for s in range(before + 1 + after)], dim=3)


def near(C: int, *, before: int, after: int, window: int, causal: bool) -> Tensor:
    """Return which query of a block sees which key of its span, up to `window` tokens away: bool (C, (before + 1 + after) * C)."""
    gaps = torch.arange(C)[:, None] - torch.arange(-before * C, (1 + after) * C)  # i - j
    return (gaps >= 0) & (gaps <= window) if causal else gaps.abs() <= window


def keys_present(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return which keys are tokens, with the axes of k (B, H, N, D_k): key_mask bool (B, N), None: all -> bool (B, 1, N, 1)."""
    return torch.ones_like(k[:, :1, :, :1], dtype=torch.bool) if key_mask is None else key_mask[:, None, :, None]
