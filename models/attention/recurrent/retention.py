"""Retention: the state decays at a fixed rate, a different rate for each head.

S_t = γ_h S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √D_k,   γ_h = 1 - 2^(-5-h), h = 0 .. H - 1
y = (silu(x W^G) ⊙ groupnorm_h(o)) W^O
Sun et al. 2023 (RetNet), arXiv:2307.08621, eqs. 5-8. q and k are rotated by the model's rotary positions instead of the paper's
xPos, whose scaling would be a second decay. Half-lives are about 22 · 2^h tokens. O(N (C + D_k) D_v) time a head, in chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, zero_padding
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation

EPS = 1e-5  # epsilon of the group norm of o


def log_gammas(n_heads: int, device: torch.device | None = None) -> Tensor:
    """Return log γ_h, (H,) float64. It is computed at each call because a buffer would be rounded in a half-precision model."""
    return torch.log1p(-(2.0 ** (-5 - torch.arange(n_heads, dtype=torch.float64, device=device))))


class Retention(EqualHeadsLayer):
    """Multi-scale retention. Its state is S (H, D_k, D_v), with D_k = D_v.

    The group norm is over each head's D_v channels. It has no weights of its own, since W^O and W^G follow it.
    """

    capabilities = Capabilities.of_recurrence(rotates=True, averages=False)
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)
    answers = "recurrence"

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_gate = nn.Linear(d_model, n_heads * self.d_head, bias=bias)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        decay = log_gammas(self.n_heads, x.device)[None, :, None].expand(q.shape[:3])
        o, S = self.recurrence(q * self.d_head**-0.5, zero_padding(k, mask), v, state["S"], decay=zero_padding(decay, mask))
        o = F.layer_norm(o, (self.d_head,), eps=EPS)
        return self.to_out(F.silu(self.to_gate(x)) * merge_heads(o).to(x.dtype)), {"S": S}
