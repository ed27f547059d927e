"""Causal cosine attention: the score of cosine.py, with a cache of past keys and values.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of tau cos(q_t, k_j)
Henry et al. 2020, arXiv:2010.04245. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.cosine import CosineHeads


class CausalCosineAttention(CosineHeads, CausalScoredAttention):
    """Multi-head causal cosine self-attention."""
