"""Causal cosine attention: the score of cosine.py over a cache of the past.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of tau cos(q_t, k_j)
Henry et al. 2020, arXiv:2010.04245. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.scoring.causal_scored import CausalScoredAttention
from models.attention.scoring.cosine import LearnedCosine


class CausalCosineAttention(CausalScoredAttention):
    """Multi-head causal cosine self-attention. tau: as in `CosineAttention`."""

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, tau: float = 10.0) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.attend = LearnedCosine(n_heads, tau=tau)
