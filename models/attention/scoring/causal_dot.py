"""Causal dot-product attention: the score of dot.py, with a cache of past keys and values.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of q_t . k_j
Luong et al. 2015, arXiv:1508.04025, section 3.1. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.dot import attend_dot


class CausalDotAttention(CausalScoredAttention):
    """Multi-head causal dot-product self-attention."""

    attend = staticmethod(attend_dot)
