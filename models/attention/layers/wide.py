"""Wide multi-head attention: every head is as wide as the model.

head_h = attend(x W_h^Q, x W_h^K, x W_h^V) with D_k = D_v = D,   y = concat(head_1 .. head_H) W^O,   W^O is (H D, D)
It equals the standard layer with D_k = D. It has 4 H D² weights, and takes H times as long as the standard layer with D_k = D / H.
"""

from models.attention.layers.mechanism import Cost
from models.attention.layers.softmax import SoftmaxAttention


class WideAttention(SoftmaxAttention):
    """Self-attention with H heads of width D. Raises ValueError for a d_head that is not d_model."""

    cost = Cost("O(N² H D)", lambda N, s: 2 * N * N * s.H * s.D)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool | None = None) -> None:
        if d_head not in (None, d_model):
            raise ValueError(f"d_head={d_head} does not fit wide heads, which are d_model={d_model} wide")
        super().__init__(d_model, n_heads, d_head=d_model, bias=bias)
