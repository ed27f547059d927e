"""Linear attention: a feature map in the place of the softmax, so that keys and values are summed once for all.

S = sum_j φ(k_j) v_jᵀ,   z = sum_j φ(k_j),   o_i = φ(q_i)ᵀ S / (φ(q_i)ᵀ z + eps),   φ(x) = elu(x) + 1 > 0 unless another is chosen
Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 4-7: the form that sees past and future alike; the maps are in feature_maps.py.
O(N D_φ D_v) time a head, and no N x N matrix.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_pairs
from models.attention.layers.mechanism import Row, cost_of_state
from models.attention.layers.multi_head import EqualHeads, merge_heads
from models.attention.linear.feature_maps import MAY_BE_ZERO, map_named
from models.parts.positions import Rotation

FeatureMap = Callable[[Tensor], Tensor]  # (B, H, N, D_k) -> (B, H, N, D_φ)


def attend_linear(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, eps: float = 1e-6, feature_map: str | FeatureMap = "elu"
) -> Tensor:
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v), bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key.

    feature_map: a name of feature_maps.py, or φ itself.
    """
    phi = map_named(feature_map) if isinstance(feature_map, str) else feature_map
    return attend_features(phi(q), phi(k), v, key_mask=key_mask, eps=eps)


def attend_features(phi_q: Tensor, phi_k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The same with the features given: (B, H, N_q, D_φ), (B, H, N_k, D_φ), (B, H, N_k, D_v), bool (B, N_k) -> (B, H, N_q, D_v)."""
    exact = torch.promote_types(v.dtype, torch.float32)  # S and z grow like N: a half-precision sum would stall
    phi_q, phi_k = phi_q.to(exact), phi_k.to(exact)
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]  # φ(k) and not k, since φ(0) = 1
    S = phi_k.transpose(-1, -2) @ v.to(exact)  # (B, H, D_φ, D_v)
    z = phi_k.sum(-2).unsqueeze(-1)  # (B, H, D_φ, 1)
    return (phi_q @ S / (phi_q @ z + eps)).to(v.dtype)


class LinearAttention(EqualHeads):
    """Multi-head linear self-attention, with the projections of `SoftmaxAttention`, so that weights are exchangeable.

    Its forward raises ValueError for a rotation, a pair mask or a pair bias: those act on single pairs of tokens,
    which this mechanism never forms.
    """

    capabilities = Capabilities(weights="sums")
    cost = cost_of_state("O(N D²)", lambda s: s.D_k, Row("linear", "O(1)", "O(1) parallel, O(N) step"))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, feature_map: str = "elu") -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        map_named(feature_map)  # refused here, and not at the first text
        self.feature_map = feature_map
        self.capabilities = replace(self.capabilities, averages=feature_map not in MAY_BE_ZERO)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        pair_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, D), bool (B, N) -> (B, N, D)."""
        refuse_pairs("linear attention", rotation, pair_mask, pair_bias)
        q, k, v = self.heads(x)  # (B, H, N, D_k)
        return self.to_out(merge_heads(attend_linear(q, k, v, key_mask=key_mask, feature_map=self.feature_map)))
