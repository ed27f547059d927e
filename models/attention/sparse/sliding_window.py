"""Sliding-window attention: softmax over the last `window` tokens, including the token itself.

o_t = sum_j p_tj v_j,   p_t = softmax over t - window < j <= t of q_t . k_j / sqrt(D_k)
Beltagy et al. 2020, arXiv:2004.05150, section 3.1, made causal. The state holds the last window - 1 keys and values, whatever the
length of the past. A token costs O(window), alone or with others in one call.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import State, at_least_float32
from models.attention.layers.grouped_heads import GroupedHeads
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import merge_heads
from models.attention.sparse.windows import attend_to_windows
from models.parts.positions import Rotation


class SlidingWindowAttention(GroupedHeads):
    """Multi-head attention to a window, with the options of `GroupedHeads`. Raises ValueError if window < 2. Its state is k and v of the
    last window - 1 tokens, the newest last, after rotation, and n, their number.
    """

    capabilities = Capabilities(causal=True, cross=False, state="constant", rotates=True, weights="pattern")
    cost = Cost("O(N w D)", lambda N, s: 2 * N * s.window * s.D)
    examples = Examples({"window": 6}, {"window": 128}, {"window": 5})
    holds = (("n", "count"),)
    settles = ("n",)
    attend = staticmethod(attend_to_windows)  # an attribute, so that the export can replace the implementation

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        window: int = 128,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(
            d_model, n_heads, d_head=d_head, bias=bias, n_kv_heads=n_kv_heads, out_bias=out_bias, qk_norm=qk_norm, norm_eps=norm_eps
        )
        if window < 2:
            raise ValueError(f"window={window} must be at least 2 tokens, because a token that attends only to itself needs no attention")
        self.n_kept = window - 1

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        kept = (self.n_kv_heads, self.n_kept, self.d_head)
        return {"k": kept, "v": kept, "n": (1,)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k), and H_k heads of k and v
        k = torch.cat([state["k"], k], dim=2)  # (B, H_k, window - 1 + N, D_k): slots
        v = torch.cat([state["v"], v], dim=2)
        filled = torch.arange(k.shape[2], device=x.device) >= self.n_kept - state["n"]  # (B, slots)
        keys, values = self.for_every_head(k), self.for_every_head(v)
        o = self.attend(q, keys, values, scale=self.d_head**-0.5, present=filled)  # padding is at the right, where no token attends
        lengths = lengths_of(x, mask)
        new = {
            "k": newest(k, lengths, self.n_kept),
            "v": newest(v, lengths, self.n_kept),
            "n": (state["n"] + lengths).clamp_max(self.n_kept),
        }
        return self.to_out(merge_heads(o.to(x.dtype))), new


def newest(x: Tensor, lengths: Tensor, n_kept: int) -> Tensor:
    """Return the n_kept slots of each row that end with its newest token: x (B, H, n_kept + N, D_k), lengths (B, 1) of new tokens -> (B, H,
    n_kept, D_k).
    """
    slots = lengths.long() + torch.arange(n_kept, device=x.device)  # (B, n_kept)
    return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def lengths_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of tokens of each row of x (B, N, D), as floats (B, 1). mask bool (B, N): True at tokens."""
    if mask is None:
        return x.new_full((x.shape[0], 1), x.shape[1], dtype=at_least_float32(x.dtype))
    return mask.sum(1, keepdim=True, dtype=at_least_float32(x.dtype))
