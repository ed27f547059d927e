"""Differential attention: the difference of two softmaxes, in which their common noise cancels.

o_i = sum_j (p_ij - λ p'_ij) v_j,   p_i = softmax_j(q_i . k_j / sqrt(d)),   p'_i = softmax_j(q'_i . k'_j / sqrt(d)),   d = D_k / 2
λ = exp(λ_q . λ_k) - exp(λ'_q . λ'_k) + λ_init,   λ_init = 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l,   y = (1 - λ_init) rmsnorm_h(o) W^O
Ye et al. 2024, arXiv:2410.05258, eqs. 1-3. q and q' are the even and the odd columns of a head. Rotary positions rotate each of them as
a head of width d, with equal angles, as the authors' code does. All heads of a layer share λ. O(N_q N_k (D_k + D_v)) time a head.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal_scored import CausalScoredAttention
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.scaled_dot_product import masked_softmax, scale_of
from models.attention.scoring.scored import ScoredAttention, ScoredHeads
from models.parts.positions import Rotation


def attend_differential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    subtracted: Tensor | float,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute differential attention without the norm: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v) -> o (B, H, N_q, D_v).

    subtracted: λ. `scale` defaults to (D_k / 2)^-1/2. mask and bias are as in `scaled_dot_product.attend`, and apply to both softmaxes.
    """

    def weights(columns: slice) -> Tensor:
        scores = (q[..., columns] * scale_of(q[..., columns], scale)) @ k[..., columns].mT  # (B, H, N_q, N_k)
        scores = scores if bias is None else scores + bias
        return masked_softmax(scores, mask)

    return (weights(slice(0, None, 2)) - subtracted * weights(slice(1, None, 2))) @ v


class ScaledHeadNorm(HeadNorm):
    """`HeadNorm` with its output multiplied by a constant."""

    def __init__(self, d_head: int, *, factor: float) -> None:
        super().__init__(d_head, eps=1e-5)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class LearnedDifference(nn.Module):
    """A module that applies `attend_differential` with a learned λ, and then the norm. Raises ValueError if D_k is odd or depth < 1."""

    def __init__(self, d_head: int, *, depth: int | None) -> None:
        super().__init__()
        if d_head % 2:
            raise ValueError(f"d_head={d_head} is odd, but differential attention halves it; choose an even width")
        if depth is not None and depth < 1:
            raise ValueError(f"depth={depth} must be at least 1, the number of the first layer; None has the value of a deep layer")
        self.first = 0.8 if depth is None else 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))  # λ_init
        self.factors = nn.Parameter(0.1 * torch.randn(4, d_head // 2))  # λ_q, λ_k, λ'_q, λ'_k
        self.norm = ScaledHeadNorm(d_head, factor=1 - self.first)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Map q, k and v, with D_k = D_v = d_head, to the normalised outputs (B, H, N_q, D_v)."""
        exps = (self.factors[0::2] * self.factors[1::2]).sum(-1).exp()
        return self.norm(attend_differential(q, k, v, subtracted=exps[0] - exps[1] + self.first, mask=mask, bias=bias))


class DifferentialHeads(ScoredHeads):
    """Heads with a differential score. The paper uses half as many heads as softmax attention, each twice as wide.

    depth: l, the number of the layer in its model, from 1; None: λ_init = 0.8, as in deep layers. A rotation needs D_k divisible by 4.
    """

    answers = "attend.norm"

    def __init__(
        self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool | None = None, depth: int | None = None
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.capabilities = replace(self.capabilities, rotates=self.d_head % 4 == 0)
        self.attend = LearnedDifference(self.d_head, depth=depth)

    def heads(self, x: Tensor, rotation: Rotation | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate as `EqualHeads.heads`. The rotation has angles of width D_k. Every other one is an angle of width D_k / 2."""
        if rotation is not None:  # columns i and i + d are a pair, so two neighbouring pairs, one of q and one of q', have equal angles
            cos, sin = (table[..., ::2].repeat_interleave(2, dim=-1) for table in (rotation.cos, rotation.sin))
            rotation = Rotation(cos, sin)
        return super().heads(x, rotation, dtype)


class DifferentialAttention(DifferentialHeads, ScoredAttention):
    """Multi-head differential self-attention."""

    capabilities = Capabilities(rotates=True, pairs=True, averages=False)


class CausalDifferentialAttention(DifferentialHeads, CausalScoredAttention):
    """Multi-head causal differential self-attention."""

    capabilities = Capabilities.of_cache(rotates=True, averages=False)
