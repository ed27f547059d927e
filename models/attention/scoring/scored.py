"""Multi-head attention by any score: what the layers that differ only in how well a key matches a query have in common.

head_h = sum_j p_ij v_j,   p_i = softmax_j(a(q_i, k_j)),   q = x W_h^Q,   k = x W_h^K,   v = x W_h^V;   y = concat(head_1 .. head_H) W^O
The scores a by their names, which are their files': dot, cosine, nadaraya_watson, additive; softmax1 is another softmax of the usual score.
All cost O(N_q N_k) memory for the scores of a head. With a cache of the past: causal_scored.py.
"""

from collections.abc import Callable

from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import EqualHeads, both_masks, merge_heads
from models.parts.positions import Rotation


class ScoredAttention(EqualHeads):
    """Base of those layers. A subclass sets `attend` once this is built: a function, or a module where the score has parameters of its own.

    attend(q, k, v, mask=.., bias=..): (B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v) -> (B, H, N_q, D_v). mask (bool, True = attend)
    and bias (added to the scores) broadcast to (B, H, N_q, N_k), or are None; a query that may attend to nothing gets 0.
    """

    capabilities = Capabilities(rotates=True, pairs=True)
    cost = ALL_PAIRS
    attend: Callable[..., Tensor]

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); arguments as in `SoftmaxAttention.forward`. Raises ValueError for a rotation that it has no form for."""
        if rotation is not None and not self.capabilities.rotates:
            raise ValueError(f"{type(self).__name__} has no form for a rotation; add positions to the embeddings")
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        return self.to_out(merge_heads(self.attend(q, k, v, mask=both_masks(key_mask, pair_mask), bias=pair_bias)))
