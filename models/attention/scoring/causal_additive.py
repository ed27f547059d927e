"""Causal additive attention: the score of additive.py, with a cache of W_k k and v of the past tokens.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of w_vᵀ tanh(W_q q_t + W_k k_j)
Bahdanau et al. 2014, arXiv:1409.0473. The t-th token costs O(t (A + D_v)) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.additive import AdditiveHeads


class CausalAdditiveAttention(AdditiveHeads, CausalScoredAttention):
    """Multi-head causal additive self-attention."""

    capabilities = Capabilities.of_cache()
