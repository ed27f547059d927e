"""Efficient attention: keys share out their attention over the positions once, and queries choose among the D_k summaries that this gives.

O = ρ_q(Q) (ρ_k(K)ᵀ V)
softmax: ρ_q = softmax over a query's columns, ρ_k = softmax of a column over the positions: the rows of ρ_q ρ_kᵀ sum to 1 by themselves
scaling: ρ_q(Q) = Q / √n, ρ_k(K) = K / √n, n = number of keys
Shen et al. 2018, arXiv:1812.01243, eqs. 3 and 4. Nothing else is scaled: there is no D_k^-1/2. O(N D_k D_v) time a head.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_pairs
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import EqualHeads, merge_heads
from models.attention.layers.scaled_dot_product import masked_softmax
from models.parts.positions import Rotation

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
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v), bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key.

    length: n of `scaling`; None: the number of keys, without masked ones.
    """
    exact = torch.promote_types(v.dtype, torch.float32)  # a sum over N positions
    q, k = q.to(exact), k.to(exact).mT  # (B, H, D_k, N_k)
    seen = None if key_mask is None else key_mask[:, None, None, :]
    if normalisation == "softmax":
        rho_q, rho_k = torch.softmax(q, dim=-1), torch.softmax(k, dim=-1) if seen is None else masked_softmax(k, seen)
    else:
        n_keys = k.shape[-1] if seen is None else seen.sum(-1, keepdim=True).clamp(min=1)  # (B, 1, 1, 1)
        rho_q, rho_k = q / (n_keys if length is None else length), k if seen is None else k * seen
    return (rho_q @ (rho_k @ v.to(exact))).to(v.dtype)


class EfficientAttention(EqualHeads):
    """Multi-head efficient self-attention, with the projections of `SoftmaxAttention`.

    Its forward raises ValueError for a rotation, a pair mask or a pair bias: those act on single pairs of tokens,
    which this mechanism never forms.
    """

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
        refuse_pairs("efficient attention", rotation, pair_mask, pair_bias)
        q, k, v = self.heads(x)  # (B, H, N, D_k)
        return self.to_out(merge_heads(attend_efficient(q, k, v, key_mask=key_mask, normalisation=self.normalisation)))
