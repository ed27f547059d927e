"""Causal softmax attention with a KV cache, which grows with every token. It is the baseline of the other causal layers.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of q_t . k_j / sqrt(D_k)
Vaswani et al. 2017, arXiv:1706.03762, sections 3.2.1 and 3.2.3. The t-th token costs O(t D_k), and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.causal import attend_to_past
from models.attention.layers.causal_scored import CausalScoredAttention


class CausalSoftmaxAttention(CausalScoredAttention):
    """Multi-head attention to the token itself and all earlier tokens."""

    attend = staticmethod(attend_to_past)
