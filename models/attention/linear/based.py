"""Based: the Taylor series of the softmax's exponential, cut off after its second power, gives a feature map of finite size.

φ(x) = [1, x', vec(x' x'ᵀ) / √2],   x' = x D_k^(-1/4):   φ(q)ᵀ φ(k) = 1 + s + s² / 2 >= 1/2   with s = qᵀk / √D_k
S_t = S_{t-1} + φ(k_t) v_tᵀ,   z_t = z_{t-1} + φ(k_t),   o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps)
Arora et al. 2024, arXiv:2402.18668. φ has D_φ = 1 + D_k + D_k² columns, so q and k are projected to D_k = 16, which makes D_φ = 273.
O(N (C + D_φ) D_v) time a head, in chunks of C tokens.
"""

import math

import torch
from torch import Tensor, nn

from models.attention.layers.causal import CausalLayer, State, attend_causal_features
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import head_width, merge_heads, split_heads
from models.parts.positions import Rotation


def taylor(x: Tensor) -> Tensor:
    """Return the second-order Taylor features φ(x) = [1, x', vec(x' x'ᵀ) / √2], x' = x D_k^(-1/4): (.., D_k) -> (.., 1 + D_k + D_k²)."""
    x = x * x.shape[-1] ** -0.25
    squares = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)


class BasedAttention(CausalLayer):
    """Multi-head causal linear attention with the feature map of Based. Its state is [S | z], (H, D_φ, D_v + 1).

    d_head is D_v, d_key is D_k. The layer ignores a rotation: the paper has none, and the model's angles are for heads of width D_v.
    """

    cost = cost_of_state("O(N D_φ D)", lambda s: 1 + 16 + 16**2)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, d_key: int = 16) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.d_key = d_key
        self.to_q = nn.Linear(d_model, n_heads * d_key, bias=bias)
        self.to_k = nn.Linear(d_model, n_heads * d_key, bias=bias)
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, 1 + self.d_key + self.d_key**2, self.d_head + 1)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        phi_q = taylor(split_heads(self.to_q(x), self.n_heads))  # (B, H, N, D_φ)
        phi_k = taylor(split_heads(self.to_k(x), self.n_heads))
        v = split_heads(self.to_v(x), self.n_heads)
        o, S = attend_causal_features(phi_q, phi_k, v, state["S"], mask=mask, recurrence=self.recurrence)
        return self.to_out(merge_heads(o)), {"S": S}
