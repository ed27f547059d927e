"""Dot-product attention: the score of a query and a key is their dot product, without a scale.

o_i = sum_j p_ij v_j,   p_i = softmax_j(q_i . k_j)
Luong et al. 2015, arXiv:1508.04025, section 3.1, "dot". O(N_q N_k (D_k + D_v)) time a head.
"""

from torch import Tensor

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.scaled_dot_product import attend
from models.attention.scoring.scored import ScoredAttention


def attend_dot(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute dot-product attention, with the arguments of `scaled_dot_product.attend`."""
    return attend(q, k, v, scale=1.0, mask=mask, bias=bias)


class DotAttention(ScoredAttention):
    """Multi-head dot-product self-attention."""

    attend = staticmethod(attend_dot)


class CausalDotAttention(CausalScoredAttention):
    """Multi-head causal dot-product self-attention."""

    attend = staticmethod(attend_dot)
