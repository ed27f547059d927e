"""Efficient attention: each of the D_k columns of the keys gives a weighted sum of all values, and each query mixes these D_k sums.

O = ρ_q(Q) (ρ_k(K)ᵀ V)
softmax: ρ_q = softmax over a query's columns, ρ_k = softmax of a column over the positions, so the rows of ρ_q ρ_kᵀ sum to 1
scaling: ρ_q(Q) = Q / √n, ρ_k(K) = K / √n, where n is the number of keys
Shen et al. 2018, arXiv:1812.01243, eqs. 3 and 4. There is no factor D_k^-1/2. O(N D_k D_v) time a head.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import both_masks
from models.attention.layers.scaled_dot_product import masked_softmax

NORMALISATIONS = ("softmax", "scaling")


def attend_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    normalisation: Literal["softmax", "scaling"] = "softmax",
    length: float | None = None,
) -> Tensor:
    """Compute efficient attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> (B, H, N_q, D_v), or 0 if there is no key.

    key_mask bool (B, N_k): True at tokens. length: the n of `scaling`; None: the number of unmasked keys.
    """
    exact = torch.promote_types(v.dtype, torch.float32)  # float32 at least, for sums over N positions
    q, k = q.to(exact), k.to(exact).mT  # (B, H, D_k, N_k)
    seen = both_masks(key_mask, None)
    if normalisation == "softmax":
        rho_q, rho_k = torch.softmax(q, dim=-1), masked_softmax(k, seen)
    else:
        n_keys = k.shape[-1] if seen is None else seen.sum(-1, keepdim=True).clamp(min=1)  # (B, 1, 1, 1)
        rho_q, rho_k = q / (n_keys if length is None else length), k if seen is None else k * seen
    return (rho_q @ (rho_k @ v.to(exact))).to(v.dtype)


class EfficientAttention(EqualHeadsEncoderLayer):
    """Multi-head efficient self-attention. It supports no rotation, because a rotation acts on scores q . k, which it does not compute."""

    capabilities = Capabilities(weights="sums")
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        normalisation: Literal["softmax", "scaling"] = "softmax",
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        if normalisation not in NORMALISATIONS:
            raise ValueError(f"normalisation={normalisation!r} is not one of {', '.join(NORMALISATIONS)}")
        self.normalisation = normalisation
        self.capabilities = replace(self.capabilities, averages=normalisation == "softmax")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_efficient(q, k, v, key_mask=key_mask, normalisation=self.normalisation)
