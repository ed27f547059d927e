"""The running maximum, by which a causal sum of exponentials is scaled so that it cannot overflow.

m_t = max(m_{t-1}, x_t). A sum of exp(x_j) is stored as the sum of exp(x_j - m_t). When m rises, the stored sum is multiplied by
exp(m_{t-1} - m_t), which is the log-decay a_t = m_{t-1} - m_t <= 0 of models/attention/layers/recurrence.py. A maximum has no
rounding, so the order of its computation does not matter.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16  # tokens in a chunk, a power of 2
GROUP = 8  # chunks in a group


class RunningMax(NamedTuple):
    """The results of `running_max`. They have no gradient: m scales a sum and its divisor alike, so no output depends on it."""

    m: Tensor  # (B, H, N, D), the maxima m_t; the lowest finite number at padding before a row's first token
    decay: Tensor  # (B, H, N, D), the log-decay a_t; 0 at the first token and at padding
    last: Tensor  # (B, H, D), the new state; `before` if the row has no token yet


@torch.no_grad()
def running_max(x: Tensor, before: Tensor, seen: Tensor) -> RunningMax:
    """Return the maxima of x (B, H, N, D) up to each token, and of `before` (B, H, D), the maxima of the earlier tokens. x: the lowest
    finite number at padding. seen: bool, broadcasts to (B, H, D), False where there are no earlier tokens.
    """
    least = torch.finfo(x.dtype).min
    m = _largest_so_far(x, torch.where(seen, before, least))
    first = torch.where(seen, before, m[:, :, 0]).unsqueeze(2)  # (B, H, 1, D); if nothing is seen, the first token has no decay
    decay = torch.cat([first, m[:, :, :-1]], dim=2) - m
    last = m[:, :, -1]
    return RunningMax(m, decay, torch.where(last > least, last, before))


def of_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, N, D) with the lowest finite number, whose exponential is 0, where mask (B, N) is False."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, torch.finfo(x.dtype).min)


def _largest_so_far(x: Tensor, first: Tensor) -> Tensor:
    """Compute `torch.cummax` along the tokens of x (B, H, N, D), with `first` (B, H, D) before them, by operators that ONNX has: by
    doubling in chunks, then over chunks."""
    N, least = x.shape[2], torch.finfo(x.dtype).min
    n_chunks = (N + CHUNK - 1) // CHUNK
    x = F.pad(x, (0, 0, 0, n_chunks * CHUNK - N), value=least).unflatten(2, (n_chunks, CHUNK))  # (B, H, n, C, D)
    shift = 1
    while shift < CHUNK:  # afterwards x_i is the largest of 2 * shift numbers
        x = torch.maximum(x, F.pad(x[..., :-shift, :], (0, 0, shift, 0), value=least))
        shift *= 2
    before = torch.maximum(_largest_before(x[..., -1, :]), first.unsqueeze(2))  # (B, H, n, D)
    return torch.maximum(x, before.unsqueeze(3)).flatten(2, 3)[:, :, :N]


def _largest_before(x: Tensor) -> Tensor:
    """Return for each of n chunks the largest of all earlier chunks: x (B, H, n, D) -> (B, H, n, D), the lowest number for the first chunk.
    Chunks are compared within groups and then groups, because a table of all pairs of chunks would be too large.
    """
    n, least = x.shape[2], torch.finfo(x.dtype).min
    n_groups = (n + GROUP - 1) // GROUP
    x = F.pad(x, (0, 0, 0, n_groups * GROUP - n), value=least).unflatten(2, (n_groups, GROUP))  # (B, H, g, G, D)
    groups = _largest_of_earlier(x.amax(3))  # (B, H, g, D)
    return torch.maximum(_largest_of_earlier(x), groups.unsqueeze(3)).flatten(2, 3)[:, :, :n]


def _largest_of_earlier(x: Tensor) -> Tensor:
    """Return at i the largest of x_j, j < i, by a table of all pairs: x (.., n, D) -> (.., n, D), the lowest number at i = 0."""
    at = torch.arange(x.shape[-2], device=x.device)
    earlier = (at[None, :] < at[:, None]).unsqueeze(-1)  # (n, n, 1)
    return torch.where(earlier, x.unsqueeze(-3), torch.finfo(x.dtype).min).amax(-2)
