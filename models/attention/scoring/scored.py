"""A base class of multi-head attention layers that differ only in the score of a query and a key.

head_h = sum_j p_ij v_j,   p_i = softmax_j(a(q_i, k_j)),   q = x W_h^Q,   k = x W_h^K,   v = x W_h^V;   y = concat(head_1 .. head_H) W^O
Each score a has a file of its name: dot, cosine, nadaraya_watson, additive. softmax1 and differential compute other weights than a
softmax from scaled dot products. The scores of a head take O(N_q N_k) memory. The layers for decoders are based on causal_scored.py.
"""

from collections.abc import Callable

from torch import Tensor

from models.attention.layers.encoder import PairLayer
from models.attention.layers.multi_head import EqualHeads


class ScoredHeads(EqualHeads):
    """The projections and the score, which an encoder layer and its decoder form share. A subclass sets `attend` as in `PairLayer`."""

    attend: Callable[..., Tensor]


class ScoredAttention(ScoredHeads, PairLayer):
    """A base class of encoder layers with any score."""
