"""Cross attention: queries from one sequence attend to keys and values from another, the memory, whose width is D_kv.

head_h = attend(x W_h^Q, m W_h^K, m W_h^V),   y = concat(head_1 .. head_H) W^O,   x is (N_q, D), m is (N_k, D_kv)
Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3, "encoder-decoder attention".
"""

from torch import Tensor, nn

from models.attention.layers.multi_head import both_masks, head_width, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import attend


class CrossAttention(nn.Module):
    """Multi-head attention whose queries come from x (B, N_q, D), and whose keys and values come from a memory (B, N_k, D_kv)."""

    def __init__(self, d_model: int, n_heads: int, *, d_memory: int, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.scale = self.d_head**-0.5
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_memory, n_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_memory, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """Apply the layer: x (B, N_q, D), memory (B, N_k, D_kv), memory_mask bool (B, N_k) -> (B, N_q, D)."""
        q = split_heads(self.to_q(x), self.n_heads)  # (B, H, N_q, D_k)
        k = split_heads(self.to_k(memory), self.n_heads)  # (B, H, N_k, D_k)
        v = split_heads(self.to_v(memory), self.n_heads)
        return self.to_out(merge_heads(attend(q, k, v, scale=self.scale, mask=both_masks(memory_mask, None))))
