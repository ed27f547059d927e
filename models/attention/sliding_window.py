"""Sliding-window attention: softmax over the last `window` tokens, the token itself included.

o_t = sum_j p_tj v_j,   p_t = softmax over t - window < j <= t of q_t . k_j / sqrt(D_k)
Beltagy et al. 2020, arXiv:2004.05150, section 3.1, looking back only. The past is the last window - 1 keys and values, whatever its length.
O(window) a token in steps; a call with N tokens makes N (window + N) scores, so long prompts are given in pieces.
"""

import torch
from torch import Tensor

from models.attention.causal import EqualHeadsLayer, State, at_least_float32, attend_to_past
from models.attention.multi_head import merge_heads, split_heads
from models.positions import Rotation, rotate


class SlidingWindowAttention(EqualHeadsLayer):
    """Multi-head attention over a window. Raises ValueError for a window of less than 2 tokens, which has no past.

    Its state is k and v of the last window - 1 tokens, the newest last, and n, how many of them there are; keys are kept as they were
    rotated, so that each carries its own position. Rows that have seen different numbers of tokens go together.
    """

    rotates = True
    attend = staticmethod(attend_to_past)  # an attribute, so that the export can put another execution in its place

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, window: int = 128) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        if window < 2:
            raise ValueError(f"window={window} must be at least 2 tokens: a token that sees itself alone needs no attention")
        self.n_kept = window - 1

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        kept = (self.n_heads, self.n_kept, self.d_head)
        return {"k": kept, "v": kept, "n": (1,)}

    def forward(
        self, x: Tensor, mask: Tensor | None = None, state: State | None = None, *, rotation: Rotation | None = None
    ) -> tuple[Tensor, State]:
        state = self.new_state(x) if state is None else state
        exact = at_least_float32(x.dtype)
        q = split_heads(self.to_q(x), self.n_heads).to(exact)  # (B, H, N, D_k)
        k = split_heads(self.to_k(x), self.n_heads).to(exact)
        v = split_heads(self.to_v(x), self.n_heads).to(exact)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        k = torch.cat([state["k"], k], dim=2)  # (B, H, window - 1 + N, D_k): slots
        v = torch.cat([state["v"], v], dim=2)
        o = self.attend(q, k, v, scale=self.d_head**-0.5, mask=self._seen(x.shape[1], state["n"]))
        lengths = _lengths(x, mask)
        new = {"k": self._newest(k, lengths), "v": self._newest(v, lengths), "n": (state["n"] + lengths).clamp_max(self.n_kept)}
        return self.to_out(merge_heads(o.to(x.dtype))), new

    def _seen(self, N: int, n: Tensor) -> Tensor:
        """Which token sees which slot: (B, 1, N, window - 1 + N). Padding stands at the right, where no token looks."""
        slots = torch.arange(self.n_kept + N, device=n.device)
        first = torch.arange(N, device=n.device)[:, None]  # token i stands in the slot window - 1 + i
        in_window = (first <= slots) & (slots <= first + self.n_kept)  # (N, slots)
        filled = slots >= self.n_kept - n  # (B, slots)
        return in_window & filled[:, None, None, :]

    def _newest(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The last window - 1 slots of each row's tokens: (B, H, window - 1 + N, D_k), (B, 1) -> (B, H, window - 1, D_k)."""
        slots = lengths.long() + torch.arange(self.n_kept, device=x.device)  # (B, window - 1)
        return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _lengths(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, 1): tokens of each row of x (B, N, D)."""
    if mask is None:
        return x.new_full((x.shape[0], 1), x.shape[1], dtype=at_least_float32(x.dtype))
    return mask.sum(1, keepdim=True, dtype=at_least_float32(x.dtype))
