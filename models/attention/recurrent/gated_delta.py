"""The gated delta rule: at each token the state decays, and the value stored at the token's key is replaced.

q, k, v = silu(conv([x W^Q, x W^K, x W^V])),   q, k of length 1,   β_t = sigmoid(x_t W^β),   a_t = -exp(A) softplus(x_t W^a + b)
S_t = exp(a_t) S_{t-1} + β_t k_t (v_t - (exp(a_t) S_{t-1})ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t / √D_k
y = (rmsnorm_h(o) ⊙ silu(x W^G)) W^O
Yang et al. 2024 (Gated DeltaNet), arXiv:2412.06464, in the form of Qwen3-Next and Qwen3.5.
O(N (C + D_k) D_v) time a head, in chunks of C tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.causal import CausalLayer, State, at_least_float32, zero_padding
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.mechanism import cost_of_state
from models.attention.layers.multi_head import head_width, merge_heads, split_heads
from models.attention.layers.short_convolution import ShortConvolution
from models.attention.recurrent.delta import unit
from models.attention.recurrent.half_lives import log_decays
from models.parts.positions import Rotation


class GatedDeltaNet(CausalLayer):
    """Gated delta rule with H heads of values and H_k heads of q and k. Each group of H / H_k value heads shares one q and k.

    Its state is S (H, D_k, D_v) and conv (K - 1, D_c), the last inputs of the convolution over the channels of q, k and v, where
    D_c = H_k D_k + H_k D_k + H D_v. The convolution encodes the order of nearby tokens, so the layer needs no rotation and ignores it.

    d_head is D_k, d_value is D_v (None: D_k), n_key_heads is H_k (None: H), kernel is K.
    """

    capabilities = Capabilities.of_recurrence(averages=False)
    cost = cost_of_state("O(N D²)", lambda s: 2 * s.D_k)
    answers = "recurrence"

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        n_key_heads: int | None = None,
        d_value: int | None = None,
        kernel: int = 4,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_key_heads = n_heads if n_key_heads is None else n_key_heads
        if n_heads % self.n_key_heads:
            raise ValueError(f"n_heads={n_heads} is not a multiple of n_key_heads={n_key_heads}; change one of them")
        self.d_head = head_width(d_model, n_heads, d_head)
        self.d_value = self.d_head if d_value is None else d_value
        self.widths = (self.n_key_heads * self.d_head, self.n_key_heads * self.d_head, n_heads * self.d_value)  # widths of q, k and v
        self.to_q = nn.Linear(d_model, self.widths[0], bias=bias)
        self.to_k = nn.Linear(d_model, self.widths[1], bias=bias)
        self.to_v = nn.Linear(d_model, self.widths[2], bias=bias)
        self.convolution = ShortConvolution(sum(self.widths), kernel)
        self.to_beta = nn.Linear(d_model, n_heads, bias=bias)
        self.to_decay = nn.Linear(d_model, n_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(n_heads))  # A
        self.dt_bias = nn.Parameter(_first_biases(n_heads))  # b
        self.to_gate = nn.Linear(d_model, n_heads * self.d_value, bias=bias)
        self.norm = HeadNorm(self.d_value, eps=norm_eps)
        self.to_out = nn.Linear(n_heads * self.d_value, d_model, bias=bias)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, self.d_head, self.d_value), "conv": self.convolution.state_shape}

    def advance(self, x: Tensor, mask: Tensor | None, state: State, rotation: Rotation | None) -> tuple[Tensor, State]:
        qkv = torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], dim=-1)  # (B, N, D_c)
        qkv, conv = self.convolution(qkv, mask, state["conv"])
        q, k, v = qkv.split(self.widths, dim=-1)
        q = self._for_every_head(unit(split_heads(q, self.n_key_heads)))  # (B, H, N, D_k)
        k = self._for_every_head(unit(split_heads(k, self.n_key_heads)))
        v = split_heads(v, self.n_heads)  # (B, H, N, D_v)
        beta = zero_padding(self.to_beta(x).sigmoid().transpose(1, 2), mask)  # (B, H, N)
        decay = zero_padding(self._decay(x), mask)
        o, S = self.recurrence(q * self.d_head**-0.5, zero_padding(k, mask), v, state["S"], decay=decay, beta=beta)
        y = self.to_out(merge_heads(self.norm(o)).to(x.dtype) * F.silu(self.to_gate(x)))
        return y, {"S": S, "conv": conv}

    def _decay(self, x: Tensor) -> Tensor:
        """Return the log-decay a: (B, N, D) -> (B, H, N), in float32 at least, because exp(A) in half precision can be infinite."""
        exact = at_least_float32(x.dtype)
        dt = F.softplus(self.to_decay(x).to(exact) + self.dt_bias)
        return (-self.A_log.to(exact).exp() * dt).transpose(1, 2)

    def _for_every_head(self, x: Tensor) -> Tensor:
        """Repeat each key head for its group of value heads, which are adjacent: (B, H_k, N, D_k) -> (B, H, N, D_k)."""
        return x.repeat_interleave(self.n_heads // self.n_key_heads, dim=1)


def _first_biases(n_heads: int) -> Tensor:
    """Return the initial biases b (H,), float32, for which the log-decay -softplus(b) of each head is that of half_lives.py."""
    return torch.log(torch.expm1(-log_decays(n_heads))).float()
