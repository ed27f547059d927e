"""Gated softmax attention: causal softmax attention whose output is multiplied by a gate that each token computes.

q = rmsnorm(x W^Q),   k = rmsnorm(x W^K),   o_t = sum over j <= t of p_tj v_j,   p_t = softmax_j(q_t . k_j / sqrt(D_k))
y = (o ⊙ sigmoid(x W^G)) W^O
Qiu et al. 2025, arXiv:2505.06708 (gate after the attention); Ainslie et al. 2023 (GQA), arXiv:2305.13245 (shared keys). This is the
form of Qwen3-Next and Qwen3.5, which have it in every fourth block. The t-th token costs O(t D_k), and the cache holds 2 t H_k D_k numbers.
"""

from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import CausalLayer, State, at_least_float32, attend_to_past
from models.attention.layers.causal_scored import remember, seen
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.mechanism import ALL_PAIRS
from models.attention.layers.multi_head import head_width, merge_heads, split_heads
from models.parts.positions import Rotation, rotate


class GatedSoftmaxAttention(CausalLayer):
    """Gated softmax attention with H query heads. Each group of H / H_k query heads shares one head of keys and one of values.

    n_key_heads is H_k (None: H). Its state is that of `CausalSoftmaxAttention`, with H_k heads.
    """

    capabilities = Capabilities.of_cache(rotates=True)
    cost = ALL_PAIRS
    gates = (("to_gate", 40.0),)  # sigmoid(40) is 1, even in float64

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        n_key_heads: int | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_key_heads = n_heads if n_key_heads is None else n_key_heads
        if n_heads % self.n_key_heads:
            raise ValueError(f"n_heads={n_heads} is not a multiple of n_key_heads={n_key_heads}; change one of them")
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_model, self.n_key_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, self.n_key_heads * self.d_head, bias=bias)
        self.to_gate = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.q_norm = HeadNorm(self.d_head, eps=norm_eps)
        self.k_norm = HeadNorm(self.d_head, eps=norm_eps)
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        slots = (self.n_key_heads, 0, self.d_head)
        return {"k": slots, "v": slots, "filled": (0,)}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        exact = at_least_float32(x.dtype)
        q = self.q_norm(split_heads(self.to_q(x), self.n_heads)).to(exact)  # (B, H, N, D_k)
        k = self.k_norm(split_heads(self.to_k(x), self.n_key_heads)).to(exact)  # (B, H_k, N, D_k)
        v = split_heads(self.to_v(x), self.n_key_heads).to(exact)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        state = remember(k, v, mask, state)
        group = self.n_heads // self.n_key_heads
        keys, values = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (state["k"], state["v"]))
        o = attend_to_past(q, keys, values, mask=seen(state["filled"], n_new=q.shape[2]))
        return self.to_out(merge_heads(o).to(x.dtype) * self.to_gate(x).sigmoid()), state
