"""Landmarks: a few vectors that represent all tokens of a sequence, each the mean of one of its segments of equal length.

A sequence of n tokens has N_l segments. Segment i begins at token floor(i n / N_l), so lengths differ by one token at most. If n < N_l,
there are only n segments, of one token each. Xiong et al. 2021 (Nyströmformer), arXiv:2102.03902, section 3.3; in the paper N_l divides
n. Prefix sums take O(N D_k) time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Landmarks(NamedTuple):
    means: Tensor  # (B, H, N_l, D_k), float32 at least; 0 for a landmark that does not exist
    exist: Tensor  # bool (B, N_l): whether the landmark exists


def segment_means(x: Tensor, n_landmarks: int, *, mask: Tensor | None = None) -> Landmarks:
    """Return N_l = n_landmarks landmarks of x (B, H, N, D_k). mask bool (B, N) is True at tokens, which may be anywhere in a row."""
    if mask is None:
        mask = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    counts = mask.cumsum(-1)  # (B, N), number of tokens up to and including each position
    n = counts[:, -1:]
    i = torch.arange(n_landmarks + 1, device=x.device)
    # (B, N_l + 1): the token at which each segment begins.
    begins = torch.minimum(torch.div(i * n, n.clamp(min=1, max=n_landmarks), rounding_mode="floor"), n)
    sizes = begins.diff(dim=1)  # (B, N_l)
    places = (counts.unsqueeze(1) <= begins.unsqueeze(2)).sum(-1)  # (B, N_l + 1), index where segment i begins
    tokens = x.to(torch.promote_types(x.dtype, torch.float32)) * mask[:, None, :, None]
    sums = F.pad(tokens.cumsum(2), (0, 0, 1, 0))  # (B, H, N + 1, D_k), sums of all tokens before an index
    totals = sums.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])).diff(dim=2)  # (B, H, N_l, D_k)
    return Landmarks(totals / sizes.clamp(min=1)[:, None, :, None], sizes > 0)
