"""Atrous (dilated) attention: softmax over every r-th token, counted in both directions from the query's token.

o_i = sum_j p_ij v_j,   p_i = softmax_j(scale * q_i . k_j) over (i - j) mod r = 0
The second head type of Child et al. 2019, arXiv:1904.10509, eq. 3. Tokens of different residues mod r do not see each other, so each
of the r residue classes is computed as a separate attention over N / r tokens: O(N² D_k / r) time.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples
from models.attention.layers.scaled_dot_product import attend
from models.attention.sparse.blocks import in_blocks, keys_present, out_of_blocks
from models.parts.checks import at_least


def attend_atrous(
    q: Tensor, k: Tensor, v: Tensor, *, rate: int, scale: float | None = None, key_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute atrous attention: q, k (B, H, N, D_k), v (B, H, N, D_v), key_mask bool (B, N) -> (B, H, N, D_v), or 0 if there is no key."""
    refuse_cross("atrous attention", q=q, k=k, v=v)
    q_r, k_r, v_r, present = (residues(x, rate) for x in (q, k, v, keys_present(k, key_mask)))  # (B, H, r, n, ..)
    seen = present.mT  # (B, 1, r, 1, n)
    if causal:
        row = torch.arange(q_r.shape[3], device=q.device)
        seen = seen & (row[:, None] >= row)
    return out_of_blocks(attend(q_r, k_r, v_r, scale=scale, mask=seen).transpose(2, 3), q.shape[2])


def residues(x: Tensor, rate: int) -> Tensor:
    """Move token i to index i // r of residue class i mod r: (B, H, N, D_k) -> (B, H, r, n, D_k)."""
    return in_blocks(x, rate, spare=1).transpose(2, 3)


class AtrousAttention(EqualHeadsEncoderLayer):
    """Multi-head attention to every `rate`-th token. Raises ValueError if rate < 1."""

    capabilities = Capabilities(cross=False, pads_to="rate", rotates=True, ordered=True, weights="pattern")
    cost = Cost("O(N² D / r)", lambda N, s: 2 * N * N * s.D / s.rate, ComplexityRow("atrous r", "disconnected classes"))
    examples = Examples({"rate": 3}, {"rate": 4}, varied=("rate", (2, 4, 8, 16)))

    def __init__(self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, rate: int = 4) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.rate = at_least("rate", rate, 1, "with 1, a token sees all")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_atrous(q, k, v, rate=self.rate, key_mask=key_mask)
