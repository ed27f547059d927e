"""Cosine attention: the score depends only on the angle between query and key, times a learned factor tau of each head.

o_i = sum_j p_ij v_j,   p_i = softmax_j(tau cos(q_i, k_j)),   cos(q, k) = q . k / (max(|q|, eps) max(|k|, eps))
Henry et al. 2020, arXiv:2010.04245; the bounded log tau of each head is from Liu et al. 2021, arXiv:2111.09883, section 3.2. Scores
are at most tau, so with tau = 1 the softmax is nearly uniform. O(N_q N_k (D_k + D_v)) time a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.scaled_dot_product import attend
from models.attention.scoring.scored import ScoredAttention, ScoredHeads

LARGEST_TAU = 100.0


def attend_cosine(
    q: Tensor, k: Tensor, v: Tensor, *, tau: Tensor | float, eps: float = 1e-6, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute cosine attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v). tau: a number or (H,)."""
    tau = tau[..., None, None] if isinstance(tau, Tensor) else tau  # (H, 1, 1)
    return attend(tau * F.normalize(q, dim=-1, eps=eps), F.normalize(k, dim=-1, eps=eps), v, scale=1.0, mask=mask, bias=bias)


class LearnedCosine(nn.Module):
    """A module that applies `attend_cosine` with a learned log tau a head. Raises ValueError if tau is not in (0, 100]."""

    def __init__(self, n_heads: int, *, tau: float) -> None:
        super().__init__()
        if not 0 < tau <= LARGEST_TAU:
            raise ValueError(f"tau={tau} must be above 0 and at most {LARGEST_TAU:g}")
        self.log_tau = nn.Parameter(torch.full((n_heads,), math.log(tau)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return attend_cosine(q, k, v, tau=self.log_tau.clamp_max(math.log(LARGEST_TAU)).exp(), mask=mask, bias=bias)


class CosineHeads(ScoredHeads):
    """Heads with a cosine score. tau: the initial value of the learned factor by which each head multiplies its cosines."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool | None = None, tau: float = 10.0) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.attend = LearnedCosine(n_heads, tau=tau)


class CosineAttention(CosineHeads, ScoredAttention):
    """Multi-head cosine self-attention."""


class CausalCosineAttention(CosineHeads, CausalScoredAttention):
    """Multi-head causal cosine self-attention."""
