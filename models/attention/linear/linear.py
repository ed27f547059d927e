"""Linear attention: a feature map replaces the softmax, so keys and values are summed once for all queries.

S = sum_j φ(k_j) v_jᵀ,   z = sum_j φ(k_j),   o_i = φ(q_i)ᵀ S / (φ(q_i)ᵀ z + eps),   φ(x) = elu(x) + 1 > 0 unless another map is chosen
Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 4-7, not causal. The maps are in feature_maps.py.
O(N D_φ D_v) time a head, and no N x N matrix.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, cost_of_state
from models.attention.linear.feature_maps import MAY_BE_ZERO, map_named

FeatureMap = Callable[[Tensor], Tensor]  # (B, H, N, D_k) -> (B, H, N, D_φ)


def attend_linear(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, eps: float = 1e-6, feature_map: str | FeatureMap = "elu"
) -> Tensor:
    """Compute linear attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v), or 0 if there is no key.

    key_mask bool (B, N_k): True at tokens. feature_map: the name of a map in feature_maps.py, or the function φ itself.
    """
    phi = map_named(feature_map) if isinstance(feature_map, str) else feature_map
    return attend_features(phi(q), phi(k), v, key_mask=key_mask, eps=eps)


def attend_features(phi_q: Tensor, phi_k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Compute linear attention: phi_q (B, H, N_q, D_φ), phi_k (B, H, N_k, D_φ), v (B, H, N_k, D_v), mask (B, N_k) -> (B, H, N_q, D_v)."""
    exact = torch.promote_types(v.dtype, torch.float32)  # float32 at least: a half-precision sum over N would stop growing
    phi_q, phi_k = phi_q.to(exact), phi_k.to(exact)
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]  # masks φ(k) and not k, because φ(0) need not be 0
    S = phi_k.transpose(-1, -2) @ v.to(exact)  # (B, H, D_φ, D_v)
    z = phi_k.sum(-2).unsqueeze(-1)  # (B, H, D_φ, 1)
    return (phi_q @ S / (phi_q @ z + eps)).to(v.dtype)


class LinearAttention(EqualHeadsEncoderLayer):
    """Multi-head linear self-attention. It supports no rotation, because a rotation acts on scores q . k, which it does not compute."""

    capabilities = Capabilities(weights="sums")
    cost = cost_of_state("O(N D²)", lambda s: s.D_k, ComplexityRow("linear", "O(1)", "O(1) parallel, O(N) step"))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, feature_map: str = "elu") -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        map_named(feature_map)  # raises ValueError for an unknown name here instead of in the first forward
        self.feature_map = feature_map
        self.capabilities = replace(self.capabilities, averages=feature_map not in MAY_BE_ZERO)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_linear(q, k, v, key_mask=key_mask, feature_map=self.feature_map)
