"""Causal Nadaraya-Watson kernel regression: the kernel of nadaraya_watson.py over a cache of the past.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of -½ |(q_t - k_j) / h|²
Nadaraya 1964; Watson 1964. The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from models.attention.scoring.causal_scored import CausalScoredAttention
from models.attention.scoring.nadaraya_watson import LearnedKernel


class CausalNadarayaWatsonAttention(CausalScoredAttention):
    """Multi-head kernel regression on the past. The options are those of `NadarayaWatsonAttention`."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        bandwidth: float = 1.0,
        per_dimension: bool = False,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.attend = LearnedKernel(n_heads, self.d_head if per_dimension else 1, h=bandwidth)
