"""Causal softmax attention with a KV cache, which grows with every token. It is the baseline of the other causal layers.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of q_t . k_j / sqrt(D_k)
Vaswani et al. 2017, arXiv:1706.03762, sections 3.2.1 and 3.2.3. The t-th token costs O(t D_k), and the cache holds 2 t H_k D_k numbers,
where H_k = H unless query heads share keys (grouped_heads.py).
"""

from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import State, attend_to_past
from models.attention.layers.causal_scored import remember, seen
from models.attention.layers.grouped_heads import GroupedHeads
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation


class CausalSoftmaxAttention(GroupedHeads):
    """Multi-head attention to the token itself and all earlier tokens. The options are those of `GroupedHeads`.

    Its state is that of `CausalScoredAttention`, with H_k heads.
    """

    capabilities = Capabilities.of_cache(rotates=True)
    cost = ALL_PAIRS

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_kv_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        o, state = self.attend_to_cache(x, mask, state, rotation)
        return self.to_out(o), state

    def attend_to_cache(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        """Return the concatenated outputs of the heads, (B, N, H * D_k), and the new state. The arguments are those of `advance`."""
        q, k, v = self.heads(x, rotation)
        state = remember(k, v, mask, state)
        keys, values = self.for_every_head(state["k"]), self.for_every_head(state["v"])
        o = attend_to_past(q, keys, values, mask=seen(state["filled"], n_new=x.shape[1]))
        return merge_heads(o).to(x.dtype), state
