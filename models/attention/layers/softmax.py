"""Multi-head attention: H heads look at the same tokens, each through projections of its own.

head_h = attend(x W_h^Q, x W_h^K, x W_h^V),   y = concat(head_1 .. head_H) W^O,   D_k = D_v = D / H unless given
Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. 4 D² weights, O(N² D) time.
"""

from dataclasses import replace

from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS, Row
from models.attention.layers.multi_head import EqualHeads, both_masks, merge_heads
from models.attention.layers.scaled_dot_product import attend
from models.parts.positions import Rotation


class SoftmaxAttention(EqualHeads):
    """Standard multi-head self-attention."""

    capabilities = Capabilities(rotates=True, pairs=True)
    cost = replace(ALL_PAIRS, row=Row("self-attention", "O(1)"))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.scale = self.d_head**-0.5

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D).

        key_mask (B, N) bool: tokens that exist. rotation: turns q and k by their position. pair_mask (N, N) bool:
        which query may see which key. pair_bias (1, H, N, N): added to the scores. A padded token may get anything.
        """
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        o = attend(q, k, v, scale=self.scale, mask=both_masks(key_mask, pair_mask), bias=pair_bias)
        return self.to_out(merge_heads(o))
