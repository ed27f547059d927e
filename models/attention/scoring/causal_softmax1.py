"""Causal softmax1 attention: the weights of softmax1.py, with a cache of past keys and values.

o_t = sum_j p_tj v_j,   p_tj = exp(s_tj) / (1 + sum_{l <= t} exp(s_tl)),   s_tj = q_t . k_j / sqrt(D_k)
Miller 2023, "Attention is off by one". The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.softmax1 import attend_softmax1


class CausalSoftmax1Attention(CausalScoredAttention):
    """Multi-head causal self-attention with softmax1 instead of the softmax."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)
    attend = staticmethod(attend_softmax1)
