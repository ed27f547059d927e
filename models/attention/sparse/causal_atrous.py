"""Causal atrous attention: softmax over every r-th past token, counted back from the token itself.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t, (t - j) mod r = 0 of q_t . k_j / sqrt(D_k)
Child et al. 2019, arXiv:1904.10509, eq. 3. The cache holds all tokens. The t-th token reads about t / r of them.
"""

from torch import Tensor

from models.attention.layers.mechanism import Examples
from models.attention.sparse.atrous import AtrousAttention, attend_atrous
from models.attention.sparse.pattern_cache import PatternCacheLayer, Slots, every
from models.parts.checks import at_least


class CausalAtrousAttention(PatternCacheLayer):
    """Multi-head causal attention to every `rate`-th past token. Raises ValueError if rate < 1."""

    cost = AtrousAttention.cost
    examples = Examples({"rate": 3}, {"rate": 4})

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, rate: int = 4) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.rate = at_least("rate", rate, 1, "with 1, a token sees all its past")

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_atrous(q, k, v, rate=self.rate, causal=True)

    def slots_of_heads(self, t: Tensor, n_slots: int) -> list[tuple[slice, Slots]]:
        return [(slice(None), every(t, n_slots, self.rate))]
