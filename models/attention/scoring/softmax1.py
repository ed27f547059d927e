"""softmax1 attention: a softmax with 1 added to the denominator, so that the weights of a head can all be near 0.

o_i = sum_j p_ij v_j,   p_ij = exp(s_ij) / (1 + sum_l exp(s_il)),   s_ij = scale * q_i . k_j + bias_ij,   scale = D_k^-1/2
Miller 2023, "Attention is off by one". It is a softmax with one more key, of score 0 and value 0. The sum of weights is
sigmoid(logsumexp(s)) < 1. The maximum that is subtracted from the scores before exp is at least 0. O(N_q N_k (D_k + D_v)) time a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
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
    """Compute softmax1 attention, with the arguments of `scaled_dot_product.attend`."""
    scores = (q * scale_of(q, scale)) @ k.transpose(-1, -2)  # (B, H, N_q, N_k)
    return softmax1(scores if bias is None else scores + bias, mask) @ v


class Softmax1Attention(ScoredAttention):
    """Multi-head self-attention with softmax1 instead of the softmax. It has the weights of `SoftmaxAttention`."""

    capabilities = Capabilities(rotates=True, pairs=True, averages=False)
    attend = staticmethod(attend_softmax1)


class CausalSoftmax1Attention(CausalScoredAttention):
    """Multi-head causal self-attention with softmax1 instead of the softmax."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)
    attend = staticmethod(attend_softmax1)
