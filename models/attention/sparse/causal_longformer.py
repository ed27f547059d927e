"""Causal Longformer: softmax over the last `window` tokens and the first g tokens, which are global and have separate projections.

token t >= g   softmax over t - window < j <= t and j < g, with q, k, v; a global token inside the window counts once
token t < g    softmax over j <= t, with q_g, k_g, v_g, since all tokens it sees are global
Beltagy et al. 2020, arXiv:2004.05150, section 3, made causal. The state holds the last window - 1 keys and values, and two sets of
keys and values of the g global tokens, whatever the length of the past. A token costs O(window + g), alone or with others in one call.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import merge_heads
from models.attention.sparse.longformer import GlobalHeads
from models.attention.sparse.sliding_window import lengths_of, newest
from models.attention.sparse.windows import attend_to_windows
from models.parts.checks import at_least
from models.parts.positions import Rotation


def attend_causal_longformer(
    local: Sequence[Tensor],
    of_globals: Sequence[Tensor],
    past: State | None = None,
    *,
    window: int,
    n_global: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    attend: Callable[..., Tensor] = attend_to_windows,
) -> tuple[Tensor, State]:
    """Compute causal Longformer attention, and return the outputs (B, H, N, D_k) and the new state. local: q, k, v. of_globals: q_g, k_g,
    v_g. Each is (B, H, N, D_k). mask bool (B, N): True at tokens, at the left. past: the state of `CausalLongformerAttention`.
    """
    given, exact = local[2].dtype, at_least_float32(local[2].dtype)
    q, k, v, q_g, k_g, v_g = (x.to(exact) for x in (*local, *of_globals))
    refuse_cross("the causal Longformer", q=q, k=k, v=v, q_g=q_g, k_g=k_g, v_g=v_g)
    if past is None:
        past = {name: q.new_zeros(len(q), *shape) for name, shape in shapes_of_past(q.shape[1], q.shape[3], window, n_global).items()}
    n, lengths, n_kept = past["n"], lengths_of(q[:, 0], mask), window - 1  # n and lengths are (B, 1)
    firsts = {"k_first": k, "v_first": v, "k_global": k_g, "v_global": v_g}
    new = {name: _first(past[name], head, n, lengths) for name, head in firsts.items()}
    slots = {"k": torch.cat([past["k"], k], dim=2), "v": torch.cat([past["v"], v], dim=2)}  # (B, H, window - 1 + N, D_k)
    new |= {name: newest(head, lengths, n_kept) for name, head in slots.items()}
    new["n"] = (n + lengths).clamp_max(n_kept + n_global)

    t = n + torch.arange(q.shape[2], device=q.device)  # (B, N), positions; once n is capped they are too small, but not below n_global
    is_global = (t < n_global).unsqueeze(-1)  # (B, N, 1)
    sees_first = torch.arange(n_global, device=q.device) <= t.unsqueeze(-1)  # (B, N, g)
    position = torch.arange(slots["k"].shape[2], device=q.device) - n_kept + n  # (B, slots); negative for empty slots
    o = attend(
        torch.where(is_global.unsqueeze(1), q_g, q),
        torch.cat([new["k_global"], new["k_first"], slots["k"]], dim=2),  # (B, H, 2 g + window - 1 + N, D_k)
        torch.cat([new["v_global"], new["v_first"], slots["v"]], dim=2),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        present=position >= n_global,  # excludes the global tokens, which have slots of their own
        seen_first=torch.cat([sees_first & is_global, sees_first & ~is_global], dim=-1),
    )
    return o.to(given), new


def shapes_of_past(n_heads: int, d_head: int, window: int, n_global: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each state tensor of one sequence, without the batch axis."""
    kept, first = (n_heads, window - 1, d_head), (n_heads, n_global, d_head)
    return {"k": kept, "v": kept, "k_first": first, "v_first": first, "k_global": first, "v_global": first, "n": (1,)}


def _first(known: Tensor, new: Tensor, n: Tensor, lengths: Tensor) -> Tensor:
    """Return the keys or values of the g global tokens, (B, H, g, D_k): those in `known`, and those among the new tokens (B, H, N, D_k). n,
    lengths (B, 1): numbers of earlier and of new tokens.
    """
    i = torch.arange(known.shape[2], device=n.device) - n  # (B, g): index among the new tokens
    here = ((i >= 0) & (i < lengths))[:, None, :, None]
    i = i.long().clamp(0, new.shape[2] - 1)[:, None, :, None]
    return torch.where(here, new.gather(2, i.expand(-1, new.shape[1], -1, new.shape[3])), known)


class CausalLongformerAttention(GlobalHeads, EqualHeadsLayer):
    """Multi-head attention to a window and the first tokens. Raises ValueError if window < 2 or n_global < 1. Its state is k and v of the
    last window - 1 tokens, the newest last; k_first and v_first, and k_global and v_global, of the global tokens by both projections; and
    n, the number of tokens, up to that at which no window contains a global token any more.
    """

    capabilities = Capabilities(causal=True, cross=False, state="constant", rotates=True, weights="pattern")
    cost = Cost("O(N (w + g) D)", lambda N, s: 2 * N * (s.window + s.n_global) * s.D)
    examples = Examples({"window": 6, "n_global": 2}, {"window": 128, "n_global": 1}, {"window": 5, "n_global": 1})
    holds = (("n", "count"),)
    settles = ("n", "k_first", "v_first", "k_global", "v_global")
    attend = staticmethod(attend_to_windows)  # an attribute, so that the export can replace the implementation

    def __init__(
        self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, window: int = 128, n_global: int = 1
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.window = at_least("window", window, 2, "a token sees itself and its past")
        self.n_global = at_least("n_global", n_global, 1, "without global tokens it is a sliding window")

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of_past(self.n_heads, self.d_head, self.window, self.n_global)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        local, of_globals = self.heads(x, rotation, exact), self.heads_of_globals(x, rotation, exact)
        o, new = attend_causal_longformer(
            local, of_globals, state, window=self.window, n_global=self.n_global, mask=mask, attend=self.attend
        )
        return self.to_out(merge_heads(o.to(x.dtype))), new
