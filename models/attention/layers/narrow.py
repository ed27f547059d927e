"""Narrow multi-head attention: the input vector itself is cut into H pieces, and a head sees only its own piece.

head_h = attend(x_h W_h^Q, x_h W_h^K, x_h W_h^V),   x = concat(x_1 .. x_H),   every W_h is (D/H, D/H)
It equals the standard layer with block-diagonal W^Q, W^K and W^V, but has 3 D²/H + D² weights instead of 4 D².
"""

import torch
from torch import Tensor, nn

from models.attention.layers import scaled_dot_product
from models.attention.layers.encoder import PairLayer
from models.attention.layers.multi_head import split_heads
from models.parts.positions import Rotation, rotate


class NarrowAttention(PairLayer):
    """Self-attention in which each head sees a slice of D/H columns. `to_q`, `to_k` and `to_v` contain H maps D/H -> D/H each.

    Raises ValueError if d_model is not divisible by n_heads, or if d_head is given and not D/H.
    """

    attend = staticmethod(scaled_dot_product.attend)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}")
        if d_head not in (None, d_model // n_heads):
            raise ValueError(f"d_head={d_head} does not fit narrow heads, which are d_model / n_heads = {d_model // n_heads} wide")
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.to_q = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_k = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_v = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_out = nn.Linear(d_model, d_model, bias=bias)

    def heads(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        pieces = split_heads(x, self.n_heads)  # (B, H, N, D/H)
        q, k, v = self.to_q(pieces), self.to_k(pieces), self.to_v(pieces)
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)


class PerHeadLinear(nn.Module):
    """H separate linear maps: (B, H, N, D_k) -> (B, H, N, D_k). Weights (H, out, in), biases (H, out)."""

    def __init__(self, n_heads: int, d_head: int, *, bias: bool) -> None:
        super().__init__()
        bound = d_head**-0.5  # the bound that nn.Linear uses
        self.weight = nn.Parameter(torch.empty(n_heads, d_head, d_head).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(n_heads, d_head)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.transpose(-1, -2)
        return y if self.bias is None else y + self.bias[:, None, :]
