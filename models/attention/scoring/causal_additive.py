"""Causal additive attention: the score of additive.py over a cache of the past, in which k is W_k k already.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of w_vᵀ tanh(W_q q_t + W_k k_j)
Bahdanau et al. 2014, arXiv:1409.0473. The t-th token costs O(t (A + D_v)) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.layers.capabilities import Capabilities
from models.attention.scoring.additive import QUERIES_AT_ONCE, AdditiveAttention, LearnedAddition, into_hidden
from models.attention.scoring.causal_scored import CausalScoredAttention


class CausalAdditiveAttention(CausalScoredAttention):
    """Multi-head causal additive self-attention, A = D_k. The projections and options are those of `AdditiveAttention`."""

    capabilities = Capabilities.of_cache()
    cost = AdditiveAttention.cost

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        queries_at_once: int | None = QUERIES_AT_ONCE,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_q, self.to_k = (into_hidden(d_model, n_heads, self.d_head) for _ in range(2))
        self.attend = LearnedAddition(n_heads, self.d_head, queries_at_once=queries_at_once)
