"""Causal Nadaraya-Watson kernel regression: the kernel of nadaraya_watson.py, with a cache of past keys and values.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of -½ |(q_t - k_j) / h|²
Nadaraya 1964; Watson 1964. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.nadaraya_watson import KernelHeads


class CausalNadarayaWatsonAttention(KernelHeads, CausalScoredAttention):
    """Multi-head kernel regression over the past tokens."""
