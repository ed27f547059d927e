"""Scaled dot-product attention: every query takes the mean of the values, weighted by how well their keys match it.

o_i = sum_j p_ij v_j,   p_i = softmax_j(scale * q_i . k_j + bias_ij),   scale = D_k^-1/2
Vaswani et al. 2017, arXiv:1706.03762, eq. 1. Costs O(N_q N_k (D_k + D_v)) time and O(N_q N_k) memory a head.
"""

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    scale None: D_k^-1/2. `mask` (boolean, True = attend) and `bias` (added to the scores) broadcast to (B, H, N_q, N_k). A query that may
    attend to nothing gets 0.
    """
    scores = (q * scale_of(q, scale)) @ k.transpose(-1, -2)  # (B, H, N_q, N_k)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1) if mask is None else masked_softmax(scores, mask)
    return weights @ v


def scale_of(q: Tensor, scale: float | None) -> float:
    """As given, or D_k^-1/2."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis, counting only what `mask` allows; a row that it forbids altogether is 0, never NaN.

    The finite minimum of the dtype stands in for -inf, since -inf - (-inf) is NaN, forwards and backwards.
    """
    return torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), dim=-1) * mask  # of a forbidden row: 1 / N_k * 0
