"""Pooling functions, which compute one vector per text from its token vectors: (B, N, D) and a boolean mask (B, N), True for tokens
-> (B, D).

A row without tokens gives 0. Sums are computed in at least float32. Reimers & Gurevych 2019, arXiv:1908.10084, section 3.
"""

import torch
from torch import Tensor


def first_token(x: Tensor, mask: Tensor) -> Tensor:
    """Return the vector at position 0; padding must be on the right."""
    return x[:, 0] * mask[:, :1]


def last_token(x: Tensor, mask: Tensor) -> Tensor:
    """Return the vector of the last token that is not padding; padding may be on either side."""
    t = torch.arange(x.shape[1], device=x.device)
    last = (t * mask).amax(1)  # (B,); 0 for a row without tokens, which is zeroed below
    vectors = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    return vectors * mask.any(1, keepdim=True)


def maximum(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each column over the tokens of a row."""
    present = torch.where(mask.unsqueeze(-1), x, torch.finfo(x.dtype).min)
    return present.amax(1) * mask.any(1, keepdim=True)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    total, count = _sum(x, mask)
    return (total / count).to(x.dtype)


def mean_sqrt_length(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the token vectors divided by the square root of their number, so that longer texts give longer vectors."""
    total, count = _sum(x, mask)
    return (total / count.sqrt()).to(x.dtype)


POOLINGS = {"cls": first_token, "mean": mean, "max": maximum, "last": last_token, "mean_sqrt_len": mean_sqrt_length}


def unit_length(x: Tensor) -> Tensor:
    """Return x / |x|, with the norm over the last axis. A zero vector stays zero."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_exact(x))
    return (x / length.clamp_min(1e-12)).to(x.dtype)


def _sum(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the token vectors of each row (B, D), and the number of tokens of each row (B, 1), raised to at least 1."""
    exact = _exact(x)
    weights = mask.unsqueeze(-1).to(exact)  # (B, N, 1)
    return (x * weights).sum(1), weights.sum(1).clamp_min(1)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
