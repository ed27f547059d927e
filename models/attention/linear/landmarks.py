"""Landmarks: a few vectors that stand for all tokens of a row, as the means of equal segments of it.

Segment i of a row's n tokens begins at the floor(i n / N_l)-th, so that segments differ by one token at most; a row of n < N_l tokens has n
segments of one token. Xiong et al. 2021 (Nyströmformer), arXiv:2102.03902, section 3.3, for n that N_l divides. O(N D_k) by prefix sums.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Landmarks(NamedTuple):
    means: Tensor  # (B, H, N_l, D_k), float32 at least; 0 where there is none
    exist: Tensor  # bool (B, N_l)


def segment_means(x: Tensor, n_landmarks: int, *, mask: Tensor | None = None) -> Landmarks:
    """Of x (B, H, N, D_k) whose tokens are where mask bool (B, N) is True, anywhere in the row.

    Only tokens count: neither what the padding holds nor how much of it there is makes a difference.
    """
    if mask is None:
        mask = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    counts = mask.cumsum(-1)  # (B, N), tokens up to here
    n = counts[:, -1:]
    i = torch.arange(n_landmarks + 1, device=x.device)
    begins = torch.minimum(torch.div(i * n, n.clamp(min=1, max=n_landmarks), rounding_mode="floor"), n)  # (B, N_l + 1), tokens before i
    sizes = begins.diff(dim=1)  # (B, N_l)
    places = (counts.unsqueeze(1) <= begins.unsqueeze(2)).sum(-1)  # (B, N_l + 1), where segment i begins
    tokens = x.to(torch.promote_types(x.dtype, torch.float32)) * mask[:, None, :, None]
    sums = F.pad(tokens.cumsum(2), (0, 0, 1, 0))  # (B, H, N + 1, D_k), of what stands before a place
    totals = sums.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])).diff(dim=2)  # (B, H, N_l, D_k)
    return Landmarks(totals / sizes.clamp(min=1)[:, None, :, None], sizes > 0)
