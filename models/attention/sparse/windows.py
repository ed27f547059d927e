"""Attention in which every query has its own window of keys: query i sees those of the slots i .. i + window - 1 that hold a token.

The slots before those of the new tokens are the past, so there are window - 1 more slots than queries. Queries are computed `window`
at a time, so the scores and masks of a head have O(N window) numbers in total, not O(N²).
"""

import torch
from torch import Tensor

from models.attention.layers.causal import attend_to_past


def attend_to_windows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, present: Tensor, seen_first: Tensor | None = None) -> Tensor:
    """Attend to windows: q (B, H, N, D_k), k and v (B, H, window - 1 + N, D_k), present bool (B, window - 1 + N) -> (B, H, N, D_k).
    seen_first, bool (B, N, n_first): k and v begin with n_first more slots, and it is True where a query sees one of these. Every query
    must see a key. Raises ValueError if there are fewer keys than queries.
    """
    N, n_first = q.shape[2], 0 if seen_first is None else seen_first.shape[-1]
    n_kept = k.shape[2] - n_first - N
    if n_kept < 0 or v.shape[2] != k.shape[2]:
        n_k, n_v = (x.shape[2] - n_first for x in (k, v))
        raise ValueError(f"{N} queries, {n_k} keys and {n_v} values: give a key and a value to each query")
    pieces = []
    for start in range(0, max(N, 1), n_kept + 1):
        end = min(start + n_kept + 1, N)
        gaps = torch.arange(end - start + n_kept, device=q.device) - torch.arange(end - start, device=q.device)[:, None]
        seen = ((gaps >= 0) & (gaps <= n_kept)) & present[:, None, start : end + n_kept]  # (B, end - start, slots)
        keys, values = (x[:, :, n_first + start : n_first + end + n_kept] for x in (k, v))
        if seen_first is not None:
            seen = torch.cat([seen_first[:, start:end], seen], dim=-1)
            keys, values = torch.cat([k[:, :, :n_first], keys], dim=2), torch.cat([v[:, :, :n_first], values], dim=2)
        pieces.append(attend_to_past(q[:, :, start:end], keys, values, scale=scale, mask=seen.unsqueeze(1)))
    return torch.cat(pieces, dim=2)
