"""Causal attention in a fixed pattern over a cache in which a slot is a position, so that a step reads the slots of its pattern only.

The base of `causal_atrous.py` and `causal_sparse.py`. From the beginning on, a call is computed in blocks as an encoder's layer is; a call
that goes on with a state gathers the slots that each of its N tokens reads, N times as many: prompts are best given whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, zero_padding
from models.attention.layers.multi_head import merge_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.parts.positions import Rotation

Slots = tuple[Tensor, Tensor]  # which slots a token reads, int64 (B, N, L), and which of them are some, bool (B, N, L)


class PatternCacheLayer(EqualHeadsLayer):
    """A subclass says `attend_whole` and `slots_of_heads`. The state is k, v and `filled`, with N slots more after a call of N tokens.

    The tokens of a row fill its slots from the left; what is behind them is zeros, until its next tokens take those places.
    """

    capabilities = Capabilities.of_cache(rotates=True, weights="pattern")

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of tokens 0 .. N - 1: (B, H, N, D_k) three times -> (B, H, N, D_k)."""
        raise NotImplementedError

    def slots_of_heads(self, t: Tensor, n_slots: int) -> list[tuple[slice, Slots]]:
        """What tokens at positions t (B, N) read of n_slots slots, by groups of heads."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        beginning = state is None or state["filled"].shape[1] == 0
        state = self.new_state(x) if state is None else state
        exact = at_least_float32(x.dtype)
        q, k, v = self.heads(x, rotation, exact)  # (B, H, N, D_k)
        k, v = zero_padding(k, mask), zero_padding(v, mask)
        t = state["filled"].sum(1, keepdim=True).long() + torch.arange(x.shape[1], device=x.device)  # (B, N)
        new = {"k": _append(state["k"], k, t), "v": _append(state["v"], v, t), "filled": _append_filled(state["filled"], mask, t)}
        if beginning:
            o = self.attend_whole(q, k, v)
        else:
            groups = self.slots_of_heads(t, new["filled"].shape[1])
            o = torch.cat([attend_to_slots(q[:, h], new["k"][:, h], new["v"][:, h], slots) for h, slots in groups], dim=1)
        return self.to_out(merge_heads(o.to(x.dtype))), new


def attend_to_slots(q: Tensor, k: Tensor, v: Tensor, slots: Slots) -> Tensor:
    """(B, H, N, D_k), (B, H, T, D_k), (B, H, T, D_v) -> (B, H, N, D_v); 0 for a token that reads no slot."""
    places, seen = slots
    row = torch.arange(q.shape[0], device=q.device)[:, None, None]
    places = places.clamp(0, k.shape[2] - 1)
    k, v = (x.transpose(1, 2)[row, places] for x in (k, v))  # (B, N, L, H, D_k)
    scores = torch.einsum("bhnd,bnlhd->bhnl", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhnl,bnlhd->bhnd", masked_softmax(scores, seen.unsqueeze(1)), v)


def every(t: Tensor, n_slots: int, rate: int) -> Slots:
    """j <= t of the residue class of t."""
    slots = t.unsqueeze(-1) % rate + rate * torch.arange(-(-n_slots // rate), device=t.device)
    return slots, slots <= t.unsqueeze(-1)


def latest(t: Tensor, window: int) -> Slots:
    """t - window <= j <= t."""
    slots = t.unsqueeze(-1) - torch.arange(window, -1, -1, device=t.device)
    return slots, slots >= 0


def _append(cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """x (B, H, N, D_k) at positions t (B, N) of a cache that has N slots more."""
    return F.pad(cache, (0, 0, 0, x.shape[2])).scatter(2, t[:, None, :, None].expand_as(x), x)


def _append_filled(filled: Tensor, mask: Tensor | None, t: Tensor) -> Tensor:
    is_token = torch.ones_like(t, dtype=filled.dtype) if mask is None else mask.to(filled.dtype)
    return F.pad(filled, (0, t.shape[1])).scatter(1, t, is_token)
