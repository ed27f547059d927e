"""Gated softmax attention: causal softmax attention whose output is multiplied by a gate that each token computes.

q = rmsnorm(x W^Q),   k = rmsnorm(x W^K),   o_t = sum over j <= t of p_tj v_j,   p_t = softmax_j(q_t . k_j / sqrt(D_k))
y = (o ⊙ sigmoid(x W^G)) W^O
Qiu et al. 2025, arXiv:2505.06708 (gate after the attention); Ainslie et al. 2023 (GQA), arXiv:2305.13245 (shared keys). This is the
form of Qwen3-Next and Qwen3.5, which have it in every fourth block. The t-th token costs O(t D_k), and the cache holds 2 t H_k D_k numbers.
"""

from torch import Tensor, nn

from models.attention.layers.causal import State
from models.attention.layers.causal_softmax import CausalSoftmaxAttention
from models.parts.positions import Rotation


class GatedSoftmaxAttention(CausalSoftmaxAttention):
    """Gated softmax attention with H query heads and H_k = n_kv_heads (None: H) heads of keys and values."""

    gates = (("to_gate", 40.0),)  # sigmoid(40) is 1, even in float64

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        n_kv_heads: int | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, n_kv_heads=n_kv_heads, qk_norm=True, norm_eps=norm_eps)
        self.to_gate = nn.Linear(d_model, n_heads * self.d_head, bias=bias)

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        o, state = self.attend_to_cache(x, mask, state, rotation)
        return self.to_out(o * self.to_gate(x).sigmoid()), state
