"""Narrow multi-head attention: the input vector itself is cut into H pieces, and a head sees only its own piece.

head_h = attend(x_h W_h^Q, x_h W_h^K, x_h W_h^V),   x = concat(x_1 .. x_H),   every W_h is (D/H, D/H)
The same as the standard layer with block-diagonal W^Q, W^K, W^V: 3 D²/H + D² weights instead of 4 D².
"""

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS, Mechanism
from models.attention.layers.multi_head import both_masks, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import attend
from models.parts.positions import Rotation, rotate


class NarrowAttention(Mechanism):
    """Self-attention with heads on slices of the input: H maps D/H -> D/H in each of `to_q`, `to_k`, `to_v`.

    Raises ValueError when d_model does not divide into n_heads, or for a d_head that is not D/H.
    """

    capabilities = Capabilities(rotates=True, pairs=True)
    cost = ALL_PAIRS

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}")
        if d_head not in (None, d_model // n_heads):
            raise ValueError(
                f"d_head={d_head} does not fit narrow heads, which are d_model / n_heads = {d_model // n_heads} wide",
            )
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.scale = self.d_head**-0.5
        self.to_q = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_k = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_v = PerHeadLinear(n_heads, self.d_head, bias=bias)
        self.to_out = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); arguments as in `SoftmaxAttention.forward`."""
        pieces = split_heads(x, self.n_heads)  # (B, H, N, D/H)
        q, k, v = self.to_q(pieces), self.to_k(pieces), self.to_v(pieces)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        o = attend(q, k, v, scale=self.scale, mask=both_masks(key_mask, pair_mask), bias=pair_bias)
        return self.to_out(merge_heads(o))


class PerHeadLinear(nn.Module):
    """H separate linear maps: (B, H, N, D_k) -> (B, H, N, D_k). Weights (H, out, in), biases (H, out)."""

    def __init__(self, n_heads: int, d_head: int, *, bias: bool) -> None:
        super().__init__()
        bound = d_head**-0.5  # as nn.Linear draws its own
        self.weight = nn.Parameter(torch.empty(n_heads, d_head, d_head).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(n_heads, d_head)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.transpose(-1, -2)
        return y if self.bias is None else y + self.bias[:, None, :]
