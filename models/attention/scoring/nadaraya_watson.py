"""Nadaraya-Watson kernel regression: a mean of the values, weighted by a Gaussian kernel of width h between query and key.

o_i = sum_j p_ij v_j,   p_i = softmax_j(-½ |(q_i - k_j) / h|²) = softmax_j(q_i . k_j / h² - ½ |k_j / h|²)
Nadaraya 1964; Watson 1964. The second form avoids an array of N_q N_k D_k differences: ½ |q_i / h|² is the same for every key and
cancels in the softmax. For keys of equal length it is dot-product attention of scale 1/h². O(N_q N_k (D_k + D_v)) time a head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.scaled_dot_product import attend
from models.attention.scoring.scored import ScoredAttention, ScoredHeads

LEAST_H = 1e-6


def attend_nadaraya_watson(
    q: Tensor, k: Tensor, v: Tensor, *, h: Tensor | float = 1.0, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute kernel regression: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v). h > 0: a number, (H, 1) or
    (H, D_k).
    """
    exact = torch.promote_types(v.dtype, torch.float32)  # float32 at least: the square of a key of length 256 overflows float16
    h = h.unsqueeze(-2) if isinstance(h, Tensor) and h.dim() > 0 else h  # (H, 1, 1 or D_k)
    q, k = q.to(exact) / h, k.to(exact) / h
    lengths = -0.5 * k.square().sum(-1).unsqueeze(-2)  # (B, H, 1, N_k)
    return attend(q, k, v.to(exact), scale=1.0, mask=mask, bias=lengths if bias is None else lengths + bias).to(v.dtype)


class LearnedKernel(nn.Module):
    """A module that applies `attend_nadaraya_watson` with a learned h = softplus(rho) + 1e-6, rho (H, 1) or (H, D_k), initially h. Raises
    ValueError if that is not above 1e-6.
    """

    def __init__(self, *shape: int, h: float) -> None:
        super().__init__()
        if not h > LEAST_H:
            raise ValueError(f"bandwidth={h} must be above {LEAST_H:g}, the smallest width of the kernel")
        above = h - LEAST_H
        self.rho = nn.Parameter(torch.full(shape, above + math.log(-math.expm1(-above))))  # softplus(rho) = above

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return attend_nadaraya_watson(q, k, v, h=F.softplus(self.rho) + LEAST_H, mask=mask, bias=bias)


class KernelHeads(ScoredHeads):
    """Heads with a Gaussian kernel. bandwidth: the initial h. per_dimension: one h for each dimension of a head, instead of one a head."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        bandwidth: float = 1.0,
        per_dimension: bool = False,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.attend = LearnedKernel(n_heads, self.d_head if per_dimension else 1, h=bandwidth)


class NadarayaWatsonAttention(KernelHeads, ScoredAttention):
    """Multi-head kernel regression over the tokens of a sequence."""


class CausalNadarayaWatsonAttention(KernelHeads, CausalScoredAttention):
    """Multi-head kernel regression over the past tokens."""
