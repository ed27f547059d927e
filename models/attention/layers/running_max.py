"""The running maximum, by which a causal sum of exponentials is scaled so that it cannot overflow.

m_t = max(m_{t-1}, x_t). A sum of exp(x_j) is stored as the sum of exp(x_j - m_t). When m rises, the stored sum is multiplied by
exp(m_{t-1} - m_t), which is the log-decay a_t = m_{t-1} - m_t <= 0 of models/attention/layers/recurrence.py. A maximum has no
rounding, so the order of its computation does not matter.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32  # tokens in a chunk, a power of 2


class RunningMax(NamedTuple):
    """The results of `running_max`. They have no gradient: m scales a sum and its divisor alike, so no output depends on it."""

    m: Tensor  # (B, H, N, D), the maxima m_t; the lowest finite number at padding before a row's first token
    decay: Tensor  # (B, H, N, D), the log-decay a_t; 0 at the first token and at padding
    last: Tensor  # (B, H, D), the new state; `before` if the row has no token yet


@torch.no_grad()
def running_max(x: Tensor, mask: Tensor | None, before: Tensor, seen: Tensor) -> RunningMax:
    """Return the maxima of x (B, H, N, D) up to each token, and of `before` (B, H, D), the maxima of the earlier tokens.

    mask (B, N): True at tokens. seen: bool, broadcasts to (B, H, D). Where it is False there are no earlier tokens, so `before` is ignored.
    """
    least = torch.finfo(x.dtype).min
    first = torch.where(seen, before, least).unsqueeze(2)  # (B, H, 1, D)
    m = torch.maximum(_largest_so_far(of_tokens(x, mask)), first)
    previous = torch.cat([first, m[:, :, :-1]], dim=2)
    decay = torch.where(previous > least, previous - m, 0.0)
    last = m[:, :, -1]
    return RunningMax(m, decay, torch.where(last > least, last, before))


def of_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, N, D) with the lowest finite number, whose exponential is 0, where mask (B, N) is False."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, torch.finfo(x.dtype).min)


def _largest_so_far(x: Tensor) -> Tensor:
    """Compute `torch.cummax` along the tokens of x (B, H, N, D), with operators that ONNX has: by doubling in chunks, then over chunks."""
    N, least = x.shape[2], torch.finfo(x.dtype).min
    n_chunks = (N + CHUNK - 1) // CHUNK
    x = F.pad(x, (0, 0, 0, n_chunks * CHUNK - N), value=least).unflatten(2, (n_chunks, CHUNK))  # (B, H, n, C, D)
    shift = 1
    while shift < CHUNK:  # afterwards x_i is the largest of 2 * shift numbers
        x = torch.maximum(x, F.pad(x[..., :-shift, :], (0, 0, shift, 0), value=least))
        shift *= 2
    chunks = torch.arange(n_chunks, device=x.device)
    earlier = (chunks[None, :] < chunks[:, None]).unsqueeze(-1)  # (n, n, 1)
    before = torch.where(earlier, x[..., -1, :].unsqueeze(2), least).amax(3)  # (B, H, n, D), of all earlier chunks
    return torch.maximum(x, before.unsqueeze(3)).flatten(2, 3)[:, :, :N]
