"""Grouped heads: each group of H / H_k query heads shares one head of keys and one of values.

q_h = x W_h^Q,   k_g = x W_g^K,   v_g = x W_g^V,   head h attends to the keys and values of g = h div (H / H_k)
Ainslie et al. 2023, arXiv:2305.13245. H_k = 1 is multi-query attention (Shazeer 2019, arXiv:1911.02150), H_k = H is multi-head attention.
A cache holds 2 H_k D_k numbers a token instead of 2 H D_k. Optionally, q and k are divided by their root mean square in each head before
their rotation (Dehghani et al. 2023, arXiv:2302.05442, section 2.1; the RMS form of Qwen3 and Gemma 3).
"""

from torch import Tensor, nn

from models.attention.layers.causal import CausalLayer, at_least_float32
from models.attention.layers.head_norm import HeadNorm
from models.attention.layers.multi_head import head_width, split_heads
from models.parts.positions import Rotation, rotate


class GroupedHeads(CausalLayer):
    """Base of causal layers with grouped heads, all D_k wide.

    n_kv_heads is H_k (None: H). bias: whether q, k and v have biases. out_bias: whether the output has one (None: as `bias`). qk_norm:
    whether q and k are normalised, with norm_eps. Raises ValueError if H is not a multiple of H_k.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = False,
        n_kv_heads: int | None = None,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if self.n_kv_heads < 1 or n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}; change one of them")
        self.d_head = head_width(d_model, n_heads, d_head)
        self.to_q = nn.Linear(d_model, n_heads * self.d_head, bias=bias)
        self.to_k = nn.Linear(d_model, self.n_kv_heads * self.d_head, bias=bias)
        self.to_v = nn.Linear(d_model, self.n_kv_heads * self.d_head, bias=bias)
        self.q_norm = HeadNorm(self.d_head, eps=norm_eps) if qk_norm else None
        self.k_norm = HeadNorm(self.d_head, eps=norm_eps) if qk_norm else None
        self.to_out = nn.Linear(n_heads * self.d_head, d_model, bias=bias if out_bias is None else out_bias)

    def heads(self, x: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, N, D) to q (B, H, N, D_k), k and v (B, H_k, N, D_k), normalise and rotate q and k. They are float32 at least."""
        exact = at_least_float32(x.dtype)
        q, k, v = split_heads(self.to_q(x), self.n_heads), split_heads(self.to_k(x), self.n_kv_heads), self.to_v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.to(exact), k.to(exact), split_heads(v, self.n_kv_heads).to(exact)
        return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)

    def for_every_head(self, x: Tensor) -> Tensor:
        """Repeat keys or values for every query head of their group: (B, H_k, N, D_k) -> (B, H, N, D_k)."""
        group = self.n_heads // self.n_kv_heads
        return x if group == 1 else x.repeat_interleave(group, dim=1)
