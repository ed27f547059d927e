"""softmax1 attention: a softmax with 1 added to the denominator, so that the weights of a head can all be near 0.

o_i = sum_j p_ij v_j,   p_ij = exp(s_ij) / (1 + sum_l exp(s_il)),   s_ij = scale * q_i . k_j + bias_ij,   scale = D_k^-1/2
Miller 2023, "Attention is off by one". It is a softmax with one more key, of score 0 and value 0. The sum of weights is
sigmoid(logsumexp(s)) < 1. The maximum that is subtracted from the scores before exp is at least 0. O(N_q N_k (D_k + D_v)) time a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.scaled_dot_product import scale_of
from models.attention.scoring.scored import ScoredAttention


def softmax1(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return exp(s_i) / (1 + sum_l exp(s_l)) over those scores s of the last axis where `mask` (bool) is True. A row without any is 0."""
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    return torch.softmax(F.pad(scores, (0, 1)), dim=-1)[..., :-1]  # the 1 in the denominator is one more key, of score 0


def attend_softmax1(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute softmax1 attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v).

    The options are those of `scaled_dot_product.attend`.
    """
    scores = (q * scale_of(q, scale)) @ k.transpose(-1, -2)  # (B, H, N_q, N_k)
    return softmax1(scores if bias is None else scores + bias, mask) @ v


def attend_softmax1_online(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, mask: Tensor | None = None, keys_at_once: int = 64
) -> Tensor:
    """Compute `attend_softmax1` for `keys_at_once` keys at a time, in O(N_q keys_at_once) memory.

    The 1 in the denominator of softmax1 is an additional key of score 0. So the running sum of the weights begins at 1, and the running
    maximum of the scores at 0.

    `scale` defaults to D_k^-1/2. mask broadcasts to (B, H, N_q, N_k). The output is 0 if there is no key.
    """
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    exact = torch.promote_types(v.dtype, torch.float32)
    top = torch.zeros_like(q[..., :1], dtype=exact)  # (B, H, N_q, 1)
    total, o = torch.ones_like(top), v.new_zeros(*q.shape[:-1], v.shape[-1], dtype=exact)
    masks = [None] * -(-k.shape[-2] // keys_at_once) if mask is None else mask.expand(*mask.shape[:-1], k.shape[-2]).split(keys_at_once, -1)
    for k_C, v_C, mask_C in zip(k.split(keys_at_once, -2), v.split(keys_at_once, -2), masks, strict=True):
        scores = ((q * scale_of(q, scale)) @ k_C.transpose(-1, -2)).to(exact)  # (B, H, N_q, C)
        if mask_C is not None:
            scores = torch.where(mask_C, scores, torch.finfo(scores.dtype).min)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        left, exps = torch.exp(top - new_top), torch.exp(scores - new_top)
        total, o, top = left * total + exps.sum(-1, keepdim=True), left * o + exps @ v_C.to(exact), new_top
    return (o / total).to(v.dtype)


class Softmax1Attention(ScoredAttention):
    """Multi-head self-attention with softmax1 instead of the softmax. It has the weights of `SoftmaxAttention`."""

    capabilities = Capabilities(rotates=True, pairs=True, averages=False)
    attend = staticmethod(attend_softmax1)


class CausalSoftmax1Attention(CausalScoredAttention):
    """Multi-head causal self-attention with softmax1 instead of the softmax."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)
    attend = staticmethod(attend_softmax1)
