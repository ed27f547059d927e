"""Causal linear attention: a feature map φ replaces the softmax, so that the past is summed up in a matrix of constant size.

S_t = S_{t-1} + φ(k_t) v_tᵀ,   z_t = z_{t-1} + φ(k_t),   o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps)
Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 16-20; φ(x) = elu(x) + 1 > 0 unless another map of feature_maps.py is chosen.
`attend_causal_features` in layers/causal.py computes it. O(N (C + D_φ) D_v) time a head, in chunks of C tokens: the cost of a token does
not depend on the length of its past.
"""

from dataclasses import replace

from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, attend_causal_features
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.attention.linear.feature_maps import MAY_BE_ZERO, map_named, n_features
from models.parts.positions import Rotation


class CausalLinearAttention(EqualHeadsLayer):
    """Multi-head causal linear attention. Its state is [S | z], (H, D_φ, D_v + 1). A rotation is applied to q and k before φ."""

    capabilities = Capabilities.of_recurrence(rotates=True)
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False, feature_map: str = "elu") -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.feature_map = feature_map
        self.capabilities = replace(self.capabilities, averages=feature_map not in MAY_BE_ZERO)
        if self.capabilities.averages:  # otherwise all features of all keys may be 0, and so may the divisor
            self.holds = (("S", "sums_in_last_column"),)
        self.n_features = n_features(feature_map, self.d_head)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, self.n_features, self.d_head + 1)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        phi = map_named(self.feature_map)
        o, S = attend_causal_features(phi(q), phi(k), v, state["S"], mask=mask, recurrence=self.recurrence)
        return self.to_out(merge_heads(o)), {"S": S}
