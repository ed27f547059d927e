"""Causal softmax attention with a cache of keys and values: the baseline, whose past grows with every token.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of q_t . k_j / sqrt(D_k)
Vaswani et al. 2017, arXiv:1706.03762, sections 3.2.1 and 3.2.3. The t-th token costs O(t D_k), and the cache holds 2 t H D_k numbers.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, attend_to_past
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation


def remember(k: Tensor, v: Tensor, mask: Tensor | None, state: State) -> State:
    """The state with N slots more, for keys (B, H_k, N, D_k) and values (B, H_k, N, D_v)."""
    is_token = torch.ones_like(k[:, 0, :, 0]) if mask is None else mask.to(k.dtype)  # (B, N)
    return {
        "k": torch.cat([state["k"], k], dim=2),  # (B, H_k, t + N, D_k)
        "v": torch.cat([state["v"], v], dim=2),
        "filled": torch.cat([state["filled"], is_token], dim=1),  # (B, t + N)
    }


def seen(filled: Tensor, *, n_new: int) -> Tensor:
    """Which of the new tokens sees which slot: (B, t + N) -> (B, 1, N, t + N). Padding sees itself, and so no query is without a key."""
    slots = torch.arange(filled.shape[1], device=filled.device)
    own = slots[-n_new:, None]  # (N, 1)
    return (slots == own) | (slots < own) & (filled[:, None, None, :] != 0)


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
    """(B, H, N, D_k), (B, H_k, N, D_k), (B, H_k, N, D_v) -> (B, H, N, D_v) and the state with N slots more.

    A group of H / H_k neighbours among the queries' heads shares the keys and values of one.
    """
    group = q.shape[1] // k.shape[1]
    state = remember(k, v, mask, state)
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (state["k"], state["v"]))
    return attend_to_past(q, k, v, scale=q.shape[-1] ** -0.5, mask=seen(state["filled"], n_new=q.shape[2])), state


class CausalSoftmaxAttention(EqualHeadsLayer):
    """Multi-head attention over all that came before. Its state is k, v and `filled`, each with one slot more for every token of a call.

    A batch has one cache with as many slots for each row: a row that was padded in a call has empty slots there (`filled` 0), which nobody
    sees and which are not reused. So rows of unequal lengths get what each would get alone, and pay in room for the longest in every call.
    """

    capabilities = Capabilities.of_cache(rotates=True)
    cost = ALL_PAIRS

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        state = self.new_state(x) if state is None else state
        exact = at_least_float32(x.dtype)
        q, k, v = self.heads(x, rotation, exact)  # (B, H, N, D_k)
        o, state = attend_to_cache(q, k, v, mask, state)
        return self.to_out(merge_heads(o.to(x.dtype))), state
