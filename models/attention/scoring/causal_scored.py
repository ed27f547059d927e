"""Causal attention by any score, with a cache of keys and values: the layers of scored.py for a decoder.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of a(q_t, k_j)
As in causal_softmax.py, the t-th token costs what t scores cost, and the cache holds 2 t H D_k numbers.
"""

from collections.abc import Callable

from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32
from models.attention.layers.causal_softmax import remember, seen
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation


class CausalScoredAttention(EqualHeadsLayer):
    """Base of those layers. A subclass sets `attend`, as one of `ScoredAttention` does; it is given a mask at every call, and no bias.

    The state is that of `CausalSoftmaxAttention`: k, as it was rotated, v and `filled`.
    """

    capabilities = Capabilities.of_cache(rotates=True)
    cost = ALL_PAIRS
    attend: Callable[..., Tensor]

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        state = self.new_state(x) if state is None else state
        exact = at_least_float32(x.dtype)
        q, k, v = self.heads(x, rotation if self.capabilities.rotates else None, exact)  # (B, H, N, D_k)
        state = remember(k, v, mask, state)
        o = self.attend(q, state["k"], state["v"], mask=seen(state["filled"], n_new=x.shape[1]))
        return self.to_out(merge_heads(o.to(x.dtype))), state
