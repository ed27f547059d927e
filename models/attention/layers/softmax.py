"""Multi-head attention: H heads attend to the same tokens, each with its own projections.

head_h = attend(x W_h^Q, x W_h^K, x W_h^V),   y = concat(head_1 .. head_H) W^O,   D_k = D_v = D / H unless given
Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. 4 D² weights, O(N² D) time.
"""

from dataclasses import replace

from models.attention.layers import scaled_dot_product
from models.attention.layers.encoder import PairLayer
from models.attention.layers.mechanism import ALL_PAIRS, ComplexityRow
from models.attention.layers.multi_head import EqualHeads


class SoftmaxAttention(EqualHeads, PairLayer):
    """Standard multi-head self-attention."""

    cost = replace(ALL_PAIRS, row=ComplexityRow("self-attention", "O(1)"))
    attend = staticmethod(scaled_dot_product.attend)

    @property
    def scale(self) -> float:
        """The factor of the scores, D_k^-1/2."""
        return self.d_head**-0.5
