"""The delta rule: a value that is written for a key replaces the old value of this key. Linear attention would add the two.

S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t / √D_k,   |q_t| = |k_t| = 1,   β_t = sigmoid(x_t W^β)
y = rmsnorm_h(o) W^O
Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024 (DeltaNet), arXiv:2406.06484. Before β_t k_t v_tᵀ is added, the
part of S along k_t is multiplied by 1 - β_t, and no part grows, so S stays bounded. O(N (C + D_k) D_v) time a head, in chunks of C tokens.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, at_least_float32, zero_padding
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads, split_heads
from models.parts.positions import Rotation, rotate

EPS = 1e-5  # epsilon of the norm of o


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(|x|² + eps) over the last axis, in float32 at least, because squares of half-precision numbers can overflow."""
    x = x.to(at_least_float32(x.dtype))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


class DeltaNet(EqualHeadsLayer):
    """Multi-head delta rule. Its state is S (H, D_k, D_v), with D_k = D_v."""

    capabilities = Capabilities.of_recurrence(rotates=True, averages=False)
    cost = cost_of_state("O(N D²)", lambda s: 2 * s.D_k)
    answers = "recurrence"

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_beta = nn.Linear(d_model, n_heads, bias=bias)
        self.norm = HeadNorm(self.d_head, eps=EPS)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q = unit(split_heads(self.to_q(x), self.n_heads))  # (B, H, N, D_k)
        k = unit(split_heads(self.to_k(x), self.n_heads))
        v = split_heads(self.to_v(x), self.n_heads)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        beta = zero_padding(self.to_beta(x).sigmoid().transpose(1, 2), mask)  # (B, H, N)
        o, S = self.recurrence(q * self.d_head**-0.5, zero_padding(k, mask), v, state["S"], beta=beta)
        return self.to_out(merge_heads(self.norm(o)).to(x.dtype)), {"S": S}
