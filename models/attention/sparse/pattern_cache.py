"""Causal attention in a fixed pattern. Slot t of the cache holds the token at position t, so a step reads only the slots of its pattern. A
call with a past copies the slots that each of its N tokens reads, so pass a prompt in one call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, zero_padding
from models.attention.layers.multi_head import merge_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.parts.positions import Rotation

Slots = tuple[Tensor, Tensor]  # slots that a token reads, int64 (B, N, L), and which entries are valid, bool (B, N, L)


class PatternCacheLayer(EqualHeadsLayer):
    """A base class of causal layers with a fixed pattern. Subclasses define `attend_whole` and `slots_of_heads`. The state is k, v and
    `filled`, with N more slots after a call of N tokens. Tokens fill the slots of a row from the left.
    """

    capabilities = Capabilities.of_cache(rotates=True, weights="pattern")

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend among tokens 0 .. N - 1, without a past: q, k and v, each (B, H, N, D_k) -> (B, H, N, D_k)."""
        raise NotImplementedError

    def slots_of_heads(self, t: Tensor, n_slots: int) -> list[tuple[slice, Slots]]:
        """Return groups of heads and the slots, among n_slots, that tokens at positions t (B, N) read in each group."""
        raise NotImplementedError

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        q, k, v = self.heads(x, rotation, exact)  # (B, H, N, D_k)
        k, v = zero_padding(k, mask), zero_padding(v, mask)
        t = state["filled"].sum(1, keepdim=True).long() + torch.arange(x.shape[1], device=x.device)  # (B, N)
        new = {"k": _append(state["k"], k, t), "v": _append(state["v"], v, t), "filled": _append_filled(state["filled"], mask, t)}
        if state["filled"].shape[1] == 0:
            o = self.attend_whole(q, k, v)
        else:
            groups = self.slots_of_heads(t, new["filled"].shape[1])
            o = torch.cat([attend_to_slots(q[:, h], new["k"][:, h], new["v"][:, h], slots) for h, slots in groups], dim=1)
        return self.to_out(merge_heads(o.to(x.dtype))), new


def attend_to_slots(q: Tensor, k: Tensor, v: Tensor, slots: Slots) -> Tensor:
    """Attend to the given slots of T: q (B, H, N, D_k), k (B, H, T, D_k), v (B, H, T, D_v) -> (B, H, N, D_v), 0 for a token without any."""
    places, seen = slots
    row = torch.arange(q.shape[0], device=q.device)[:, None, None]
    places = places.clamp(0, k.shape[2] - 1)
    k, v = (x.transpose(1, 2)[row, places] for x in (k, v))  # (B, N, L, H, D_k)
    scores = torch.einsum("bhnd,bnlhd->bhnl", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhnl,bnlhd->bhnd", masked_softmax(scores, seen.unsqueeze(1)), v)


def every(t: Tensor, n_slots: int, rate: int) -> Slots:
    """Return, for tokens at positions t (B, N), the slots j <= t with j mod rate = t mod rate."""
    slots = t.unsqueeze(-1) % rate + rate * torch.arange(-(-n_slots // rate), device=t.device)
    return slots, slots <= t.unsqueeze(-1)


def latest(t: Tensor, window: int) -> Slots:
    """Return, for tokens at positions t (B, N), the slots j with t - window <= j <= t."""
    slots = t.unsqueeze(-1) - torch.arange(window, -1, -1, device=t.device)
    return slots, slots >= 0


def _append(cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Return the cache with N more slots, and with x (B, H, N, D_k) written to slots t (B, N)."""
    return F.pad(cache, (0, 0, 0, x.shape[2])).scatter(2, t[:, None, :, None].expand_as(x), x)


def _append_filled(filled: Tensor, mask: Tensor | None, t: Tensor) -> Tensor:
    is_token = torch.ones_like(t, dtype=filled.dtype) if mask is None else mask.to(filled.dtype)
    return F.pad(filled, (0, t.shape[1])).scatter(1, t, is_token)
