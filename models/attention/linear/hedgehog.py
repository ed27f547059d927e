"""Causal linear attention with Hedgehog, a feature map that can be trained to imitate the exponential of softmax attention.

φ(x) = softmax([W x + b, -(W x + b)]),   initially W = I and b = 0; each head has one W and b for queries and another for keys
S_t = S_{t-1} + φ(k_t) v_tᵀ,   z_t = z_{t-1} + φ(k_t),   o_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + eps)
Zhang et al. 2024, arXiv:2402.04347, with a softmax instead of two exponentials, which bounds φ. O(N (C + 2 D_k) D_v) time a head, in
chunks of C tokens.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import EqualHeadsLayer, State, attend_causal_features
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import merge_heads
from models.parts.positions import Rotation

EPS = 1e-10  # small, because φ(q)ᵀ φ(k) is about 1 / (2 D_k), and far less for spiky features


def hedgehog_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return φ(x) = softmax([W x + b, -(W x + b)]): x (B, H, N, D_k), W (H, D_k, D_k), b (H, 1, D_k) -> (B, H, N, 2 D_k)."""
    y = x @ weight.mT + bias
    return torch.softmax(torch.cat([y, -y], dim=-1), dim=-1)


class HedgehogMap(nn.Module):
    """The feature map φ of every head. Initially W = I and b = 0."""

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(d_head).repeat(n_heads, 1, 1))  # (H, D_k, D_k)
        self.bias = nn.Parameter(torch.zeros(n_heads, 1, d_head))

    def forward(self, x: Tensor) -> Tensor:
        return hedgehog_features(x, self.weight, self.bias)


class HedgehogAttention(EqualHeadsLayer):
    """Multi-head causal linear attention with Hedgehog's maps. Its state is [S | z], (H, 2 D_k, D_v + 1)."""

    capabilities = Capabilities.of_recurrence(rotates=True)
    cost = cost_of_state("O(N D²)", lambda s: 3 * s.D_k)
    holds = (("S", "sums_in_last_column"),)

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = False) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.phi_q = HedgehogMap(n_heads, self.d_head)
        self.phi_k = HedgehogMap(n_heads, self.d_head)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, 2 * self.d_head, self.d_head + 1)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        q, k, v = self.heads(x, rotation)  # (B, H, N, D_k)
        phi_q, phi_k = self.phi_q(q), self.phi_k(k)
        o, S = attend_causal_features(phi_q, phi_k, v, state["S"], mask=mask, eps=EPS, recurrence=self.recurrence)
        return self.to_out(merge_heads(o)), {"S": S}
