"""Causal Transformer-VQ with a position bias for near keys. Older keys are represented by their codes alone, without position.

s_ij = scale q_i . k^_j + b_(i-j)   for j in i's block of C tokens or in the block before it,   scale q_i . k^_j for older ones,   j <= i
o_i = softmax_j(s_ij) V, where older keys are summed up code by code, as in vq.py
Lingle 2023, arXiv:2309.16354, section 3. O(N (2 C + Z) D_k) time a head. This is a function only; the layers `vq` and `causal_vq` have
no position bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.capabilities import refuse_cross
from models.attention.layers.causal import at_least_float32, with_ones, zero_padding
from models.attention.layers.scaled_dot_product import scale_of
from models.attention.linear.vq import mean_of_codes, weights_of_codes
from models.attention.sparse.blocks import in_blocks, keys_present, near, out_of_blocks, spans


def attend_causal_to_codes_and_near(
    q: Tensor, codes: Tensor, v: Tensor, codebook: Tensor, bias: Tensor, *, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Attend causally to codes, with a position bias for near keys. Returns (B, H, N, D_v), 0 before a row's first token.

    q (B, H, N, D_k), codes int64 (B, H, N), v (B, H, N, D_v), codebook (H, Z, D_k), bias (H or 1, 2 C): b of the distances 0 .. 2 C - 1,
    which sets C. `scale` defaults to D_k^-1/2. mask bool (B, N): True at tokens. Raises ValueError if the number of distances is odd.
    """
    refuse_cross("causal attention to codes", q=q, codes=codes, v=v)
    n_distances, Z, exact = bias.shape[-1], codebook.shape[-2], at_least_float32(v.dtype)
    if n_distances % 2 or not n_distances:
        raise ValueError(f"bias has {n_distances} distances, an odd number; give as many as two blocks have tokens")
    C = n_distances // 2
    one_hot = zero_padding(F.one_hot(codes, Z).to(exact), mask)  # (B, H, N, Z)
    codebook, values = codebook.to(exact), with_ones(v)  # [v | 1]: the last output column is the sum of the weights
    q_blocks = in_blocks(q.to(exact) * scale_of(q, scale), C)  # (B, H, n, C, D_k)
    n = q_blocks.shape[2]
    sums = in_blocks(one_hot, C).mT @ in_blocks(values, C)  # (B, H, n, Z, D_v + 1): [U | L] of every block
    older = F.pad(sums.cumsum(2), (0, 0, 0, 0, 2, 0))[:, :, :n]  # index m: sum of blocks 0 .. m - 2

    span, present = {"before": 1, "after": 0}, keys_present(values, mask)
    k_hat, near_v, present = (spans(x, n, C, **span) for x in (one_hot @ codebook, values, present))  # (B, H, n, 2 C, ..)
    seen = near(C, **span, window=n_distances, causal=True).to(q.device) & present.mT  # (B, 1, n, C, 2 C)
    gaps = torch.arange(C, device=q.device)[:, None] - torch.arange(-C, C, device=q.device)  # i - j
    of_near = q_blocks @ k_hat.mT + bias.to(exact)[:, gaps.clamp_min(0)].unsqueeze(1)  # (B, H, n, C, 2 C)
    of_codes = q_blocks @ codebook.unsqueeze(1).mT  # (B, H, n, C, Z)
    counts = [older[..., -1].unsqueeze(-2).expand_as(of_codes), seen.to(exact).expand_as(of_near)]
    e = weights_of_codes(torch.cat([of_codes, of_near], dim=-1), torch.cat(counts, dim=-1))
    o = e[..., :Z] @ older + e[..., Z:] @ near_v  # (B, H, n, C, D_v + 1)
    return out_of_blocks(mean_of_codes(o[..., :-1], o[..., -1:]), q.shape[2]).to(v.dtype)
