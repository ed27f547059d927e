"""Causal differential attention: the weights of differential.py, with a cache of past keys and values.

o_t = sum_j (p_tj - λ p'_tj) v_j,   p_t = softmax over j <= t of q_t . k_j / sqrt(d),   p'_t likewise of q'_t and k'_j,   d = D_k / 2
y_t = (1 - λ_init) rmsnorm_h(o_t) W^O
Ye et al. 2024, arXiv:2410.05258, eqs. 1-3. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.scoring.differential import DifferentialHeads


class CausalDifferentialAttention(DifferentialHeads, CausalScoredAttention):
    """Multi-head causal differential self-attention."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)
