"""Scaled dot-product attention: the output of a query is the mean of the values, weighted by how well their keys match the query.

o_i = sum_j p_ij v_j,   p_i = softmax_j(scale * q_i . k_j + bias_ij),   scale = D_k^-1/2
Vaswani et al. 2017, arXiv:1706.03762, eq. 1. Costs O(N_q N_k (D_k + D_v)) time and O(N_q N_k) memory a head.
"""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute scaled dot-product attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    `scale` defaults to D_k^-1/2. `mask` (boolean, True = attend) and `bias` (added to the scores) broadcast to (B, H, N_q, N_k). A query
    that may attend to no key gets the output 0.
    """
    scores = (q * scale_of(q, scale)) @ k.transpose(-1, -2)  # (B, H, N_q, N_k)
    if bias is not None:
        scores = scores + bias
    return masked_softmax(scores, mask) @ v


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return `scale`, or D_k^-1/2 if it is None."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over those entries of the last axis where `mask` is True (None: over all). A row without any True is 0, not NaN.

    Masked scores become the finite minimum of the dtype and not -inf, because -inf - (-inf) is NaN, also in the backward pass.
    """
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # In a row whose keys are all masked, the softmax gives every key the weight 1/N_k. The product with the mask makes these weights 0.
    return torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), dim=-1) * mask
