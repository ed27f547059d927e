"""Gated linear attention: every row of S decays at a rate that is computed from the token.

S_t = diag(exp(a_t)) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √D_k,   a_t = logsigmoid(x_t W_1 W_2 + b) / 16
y = (silu(x W^G) ⊙ rmsnorm_h(o)) W^O
Yang et al. 2023 (GLA), arXiv:2312.06635, section 4. W_1 W_2 has rank 16. O(N (C D_k + D_k D_v)) time a head, in chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, zero_padding
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.recurrent.half_lives import log_decays
from models.parts.positions import Rotation

TEMPERATURE = 16.0  # the divisor in a_t; without it, at b = 0 an untrained gate is 1/2, and the state decays within a few tokens
RANK = 16  # rank of W_1 W_2
EPS = 1e-5  # epsilon of the RMS norm of o


class GatedLinearAttention(EqualHeadsLayer):
    """Multi-head gated linear attention. Its state is S (H, D_k, D_v), with D_k = D_v."""

    capabilities = Capabilities.of_recurrence(rotates=True, averages=False)
    cost = cost_of_state("O(N D²)", lambda s: s.D_k)
    answers = "recurrence"

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.to_low = nn.Linear(d_model, RANK, bias=False)  # W_1
        self.to_decay = nn.Linear(RANK, n_heads * self.d_head, bias=False)  # W_2
        self.decay_bias = nn.Parameter(_first_biases(n_heads).repeat_interleave(self.d_head))  # b, (H * D_k,)
        self.to_gate = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.norm = HeadNorm(self.d_head, eps=EPS)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        a = split_heads(F.logsigmoid(self.to_decay(self.to_low(x)) + self.decay_bias) / TEMPERATURE, self.n_heads)
        o, S = self.recurrence(q * self.d_head**-0.5, zero_padding(k, mask), v, state["S"], decay=zero_padding(a, mask))
        return self.to_out(F.silu(self.to_gate(x)) * merge_heads(self.norm(o)).to(x.dtype)), {"S": S}


def _first_biases(n_heads: int) -> Tensor:
    """Return the initial biases b (H,), float32, for which the log-decay logsigmoid(b) / 16 of each head is that of half_lives.py."""
    return torch.logit(torch.exp(TEMPERATURE * log_decays(n_heads))).float()
