"""Causal attention with any score a(q, k), and a cache of keys and values: the base of causal_softmax.py and of scores in scoring/.

o_t = sum_j p_tj v_j,   p_t = softmax over j <= t of a(q_t, k_j)
For the t-th token t scores are computed in each head. The cache then holds 2 t H D_k numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation


def remember(k: Tensor, v: Tensor, mask: Tensor | None, state: State) -> State:
    """Return the cache `state` with N more slots: k (B, H_k, N, D_k), v (B, H_k, N, D_v), and `filled`, which is 0 at padding of mask (B,
    N).
    """
    is_token = torch.ones_like(k[:, 0, :, 0]) if mask is None else mask.to(k.dtype)  # (B, N)
    return {
        "k": torch.cat([state["k"], k], dim=2),  # (B, H_k, t + N, D_k)
        "v": torch.cat([state["v"], v], dim=2),
        "filled": torch.cat([state["filled"], is_token], dim=1),  # (B, t + N)
    }


def seen(filled: Tensor, *, n_new: int) -> Tensor:
    """Return which of the N = n_new new tokens sees which slot: filled (B, t + N), 1 in slots with a token -> bool (B, 1, N, t + N). A
    query sees its own slot even if it is padding.
    """
    slots = torch.arange(filled.shape[1], device=filled.device)
    own = slots[-n_new:, None]  # (N, 1)
    return (slots == own) | (slots < own) & (filled[:, None, None, :] != 0)


class CausalScoredAttention(EqualHeadsLayer):
    """A base class of causal layers with any score. A subclass sets `attend`, as in `PairLayer`; it is called with a mask and no bias. Its
    state is k (after the rotation), v and `filled` (0 at padding), each with one more slot for every token of a call.
    """

    capabilities = Capabilities.of_cache(rotates=True)
    cost = ALL_PAIRS
    attend: Callable[..., Tensor]

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        q, k, v = self.heads(x, rotation if self.capabilities.rotates else None, exact)  # (B, H, N, D_k)
        state = remember(k, v, mask, state)
        o = self.attend(q, state["k"], state["v"], mask=seen(state["filled"], n_new=x.shape[1]))
        return self.to_out(merge_heads(o.to(x.dtype))), state
