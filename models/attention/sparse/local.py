"""Local attention: softmax over the tokens within a distance w.

o_i = sum_j p_ij v_j,   p_i = softmax_j(scale * q_i . k_j) over |i - j| <= w,   or 0 <= i - j <= w if causal
Child et al. 2019, arXiv:1904.10509; Beltagy et al. 2020, arXiv:2004.05150, section 3.1. O(N (2w + C) D_k) time, in blocks of C tokens. In
sliding_window.py, the causal layer with a state, `window` is w + 1.
"""

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, of_nothing
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples
from models.attention.layers.scaled_dot_product import attend
from models.attention.sparse.blocks import in_blocks, keys_present, near, out_of_blocks, spans
from models.parts.checks import at_least


def attend_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    block: int = 64,
) -> Tensor:
    """Compute local attention: q (B, H, N_q, D_k), k (B, H, N_k, D_k), v (B, H, N_k, D_v), key_mask (B, N_k) -> (B, H, N_q, D_v), 0 for a
    query that sees no key. window: w. block: C; it affects the speed only.
    """
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    before = -(-window // block)  # blocks on each side
    reach = {"before": before, "after": 0 if causal else before}
    C = torch.sym_min(block, max(q.shape[2], k.shape[2]))  # a short sequence is not padded to a full block
    q_blocks = in_blocks(q, C)  # (B, H, n, C, D_k)
    n = q_blocks.shape[2]
    keys, values, present = (spans(x, n, C, **reach) for x in (k, v, keys_present(k, key_mask)))  # (B, H, n, span, ..)
    seen = near(C, **reach, window=window, causal=causal).to(q.device) & present.mT  # (B, 1, n, C, span)
    return out_of_blocks(attend(q_blocks, keys, values, scale=scale, mask=seen), q.shape[2])


class LocalAttention(EqualHeadsEncoderLayer):
    """Multi-head attention to the `window` tokens on either side. Raises ValueError if window < 0 or block < 1."""

    capabilities = Capabilities(pads_to="block", rotates=True, ordered=True, weights="pattern")
    cost = Cost("O(r N D)", lambda N, s: 2 * N * min(N, 2 * s.window + 64) * s.D, ComplexityRow("restricted (radius r)", "O(N / r)"))
    examples = Examples({"window": 3, "block": 4}, {"window": 128}, {"window": 4, "block": 8}, ("window", (64, 128, 256, 512)))

    def __init__(
        self, d_model: int, n_heads: int, *, d_head: int | None = None, bias: bool = True, window: int = 128, block: int = 64
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        self.window = at_least("window", window, 0, "with 0, a token sees itself alone")
        self.block = at_least("block", block, 1, "it is a number of tokens")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_local(q, k, v, window=self.window, key_mask=key_mask, block=self.block)
