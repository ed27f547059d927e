"""Linear attention: a feature map in the place of the softmax, so that keys and values are summed once for all.

S = sum_j φ(k_j) v_jᵀ,   z = sum_j φ(k_j),   o_i = φ(q_i)ᵀ S / (φ(q_i)ᵀ z + eps),   φ(x) = elu(x) + 1 > 0
Katharopoulos et al. 2020, arXiv:2006.16236, eqs. 4-7: the form that sees past and future alike.
O(N D_k D_v) time a head, and no N x N matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.multi_head import head_width, merge_heads, split_heads
from models.positions import Rotation


def attend_linear(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(B, H, N_q, D_k), (B, H, N_k, D_k), (B, H, N_k, D_v), bool (B, N_k) -> (B, H, N_q, D_v); 0 without any key."""
    exact = torch.promote_types(v.dtype, torch.float32)  # S and z grow like N: a half-precision sum would stall
    phi_q, phi_k = phi(q).to(exact), phi(k).to(exact)
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]  # φ(k) and not k, since φ(0) = 1
    S = phi_k.transpose(-1, -2) @ v.to(exact)  # (B, H, D_k, D_v)
    z = phi_k.sum(-2).unsqueeze(-1)  # (B, H, D_k, 1)
    return (phi_q @ S / (phi_q @ z + eps)).to(v.dtype)


def phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


class LinearAttention(nn.Module):
    """Multi-head linear self-attention, with the projections of `SoftmaxAttention`, so that weights are exchangeable.

    Its forward raises ValueError for a rotation, a pair mask or a pair bias: those act on single pairs of tokens,
    which this mechanism never forms.
    """

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

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
        if rotation is not None or pair_mask is not None or pair_bias is not None:
            raise ValueError(
                "linear attention has no form for a rotation, a pair mask or a pair bias; use softmax attention",
            )
        q = split_heads(self.to_q(x), self.n_heads)  # (B, H, N, D_k)
        k = split_heads(self.to_k(x), self.n_heads)
        v = split_heads(self.to_v(x), self.n_heads)
        return self.to_out(merge_heads(attend_linear(q, k, v, key_mask=key_mask)))
