"""Causal softmax1 attention: the weights of softmax1.py over a cache of the past.

o_t = sum_j p_tj v_j,   p_tj = exp(s_tj) / (1 + sum_{l <= t} exp(s_tl)),   s_tj = q_t . k_j / sqrt(D_k)
Miller 2023, "Attention is off by one". The t-th token costs O(t D_k) a head, and the cache holds 2 t H D_k numbers.
"""

from functools import partial

from models.attention.layers.capabilities import Capabilities
from models.attention.scoring.causal_scored import CausalScoredAttention
from models.attention.scoring.softmax1 import attend_softmax1


class CausalSoftmax1Attention(CausalScoredAttention):
    """Multi-head causal self-attention with softmax1 in the place of the softmax."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.attend = partial(attend_softmax1, scale=self.d_head**-0.5)
