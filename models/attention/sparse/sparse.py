"""Sparse attention: a token sees near tokens, and every l-th token or the ends of blocks. Two layers connect all tokens.

There are three patterns, in which token i sees the tokens j with
union    |i - j| <= l  or  (i - j) mod l = 0                      in every head
strided  A: |i - j| <= l                 B: (i - j) mod l = 0     heads of type A first, then heads of type B
fixed    A: floor(i / l) = floor(j / l)  B: j mod l >= l - c      heads of type A first, then heads of type B
If causal, also j <= i. Child et al. 2019, arXiv:1904.10509, eqs. 2-4 and section 4, which factorises the pattern over heads or layers;
the union is a common reading of it, in which a key in both parts counts once. O(N sqrt(N) D_k) time if l is near sqrt(N).
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from models.attention.layers.capabilities import Capabilities, refuse_cross
from models.attention.layers.encoder import EqualHeadsEncoderLayer
from models.attention.layers.mechanism import ComplexityRow, Cost, Examples
from models.attention.layers.multi_head import EqualHeads
from models.attention.layers.scaled_dot_product import attend, masked_softmax, scale_of
from models.attention.sparse.atrous import attend_atrous, residues
from models.attention.sparse.blocks import in_blocks, keys_present, near, out_of_blocks, spans
from models.attention.sparse.local import attend_local
from models.parts.checks import at_least, check_choice

Mode = Literal["union", "strided", "fixed"]


def attend_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mode: Mode,
    stride: int,
    n_summaries: int = 8,
    n_heads_a: int | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute sparse attention: q, k (B, H, N, D_k), v (B, H, N, D_v), key_mask bool (B, N) -> (B, H, N, D_v), or 0 if there is no key.
    mode: the pattern. stride: l. n_summaries: c, for `fixed` only. n_heads_a: number of heads of type A; None: half, rounded up.
    """
    refuse_cross("sparse attention", q=q, k=k, v=v)
    options: dict[str, Any] = {"scale": scale_of(q, scale), "causal": causal}
    if mode == "union":
        return _union(q, k, v, stride=stride, key_mask=key_mask, **options)
    a = heads_of_type_a(q.shape[1], n_heads_a)
    first, second = ([x[:, :a] for x in (q, k, v)], [x[:, a:] for x in (q, k, v)])
    options["key_mask"] = key_mask
    if mode == "strided":
        return torch.cat(
            [attend_local(*first, window=stride, block=stride, **options), attend_atrous(*second, rate=stride, **options)], dim=1
        )
    return torch.cat([_block(*first, stride=stride, **options), _summaries(*second, stride=stride, c=n_summaries, **options)], dim=1)


def heads_of_type_a(n_heads: int, n_heads_a: int | None = None) -> int:
    """Return n_heads_a, or half of the heads, rounded up, if it is None."""
    return n_heads - n_heads // 2 if n_heads_a is None else n_heads_a


def _union(q: Tensor, k: Tensor, v: Tensor, *, stride: int, scale: float, key_mask: Tensor | None, causal: bool) -> Tensor:
    """Attend in pattern `union`. Both of its parts use blocks of l tokens, in which every l-th token is at the same place of each block."""
    reach = {"before": 1, "after": 0 if causal else 1}
    q_blocks = in_blocks(q, stride, spare=1)  # (B, H, n, l, D_k)
    n = q_blocks.shape[2]
    present = keys_present(k, key_mask)
    near_k, near_v, near_present = (spans(x, n, stride, **reach) for x in (k, v, present))  # (B, H, n, span, ..)
    seen_near = near(stride, **reach, window=stride, causal=causal).to(q.device) & near_present.mT  # (B, 1, n, l, span)
    k_r, v_r = residues(k, stride), residues(v, stride)  # (B, H, l, n, ..)
    row = torch.arange(n, device=q.device)
    gaps = row[:, None] - row  # distances in blocks; a distance of at most 1 is near
    far = gaps > 1 if causal else gaps.abs() > 1
    seen_far = (residues(present, stride).mT & far).transpose(2, 3)  # (B, 1, n, l, n)
    scaled = q_blocks * scale
    scores_far = (scaled.transpose(2, 3) @ k_r.mT).transpose(2, 3)  # (B, H, n, l, n)
    p = masked_softmax(
        torch.cat([scaled @ near_k.mT, scores_far], dim=-1),
        torch.cat([seen_near, seen_far.expand(seen_near.shape[0], -1, -1, -1, -1)], dim=-1),
    )
    span = near_k.shape[3]
    o = p[..., :span] @ near_v + (p[..., span:].transpose(2, 3) @ v_r).transpose(2, 3)
    return out_of_blocks(o, q.shape[2])


def _block(q: Tensor, k: Tensor, v: Tensor, *, stride: int, scale: float, key_mask: Tensor | None, causal: bool) -> Tensor:
    seen = in_blocks(keys_present(k, key_mask), stride).mT  # (B, 1, n, 1, l)
    if causal:
        seen = seen & near(stride, before=0, after=0, window=stride, causal=True).to(q.device)
    o = attend(in_blocks(q, stride), in_blocks(k, stride), in_blocks(v, stride), scale=scale, mask=seen)
    return out_of_blocks(o, q.shape[2])


def _summaries(q: Tensor, k: Tensor, v: Tensor, *, stride: int, c: int, scale: float, key_mask: Tensor | None, causal: bool) -> Tensor:
    ends = [
        in_blocks(x, stride, spare=1)[:, :, :, stride - c :].flatten(2, 3) for x in (k, v, keys_present(k, key_mask))
    ]  # (B, H, n c, ..)
    seen = ends[2].mT  # (B, 1, 1, n c)
    if causal:
        place = torch.arange(ends[0].shape[2], device=q.device)
        seen = seen & (torch.arange(q.shape[2], device=q.device)[:, None] >= place // c * stride + stride - c + place % c)
    return attend(q, ends[0], ends[1], scale=scale, mask=seen)


class SparseHeads(EqualHeads):
    """Heads that attend in pattern `union`, `strided` or `fixed`. Raises ValueError if the options are invalid."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        mode: Mode = "union",
        stride: int = 32,
        n_summaries: int = 8,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        check_choice("mode", mode, get_args(Mode))
        at_least("stride", stride, 1, "it is a number of tokens")
        if mode == "fixed" and not 1 <= n_summaries <= stride:
            raise ValueError(f"n_summaries={n_summaries} must be from 1 to stride={stride}, the tokens of a block")
        if mode != "union" and n_heads < 2:
            raise ValueError(f"n_heads={n_heads}: mode={mode!r} has heads of two types; give 2 heads, or mode='union'")
        self.mode, self.stride, self.n_summaries = mode, stride, n_summaries


class SparseAttention(SparseHeads, EqualHeadsEncoderLayer):
    """Multi-head attention in pattern `union`, `strided` or `fixed`."""

    capabilities = Capabilities(cross=False, pads_to="stride", rotates=True, ordered=True, weights="pattern")
    cost = Cost("O(N (k + N / k) D)", lambda N, s: 2 * N * (3 * s.stride + N / s.stride) * s.D, ComplexityRow("sparse k", "2"))
    examples = Examples({"stride": 4}, {"stride": 32}, {"stride": 8}, ("stride", (8, 16, 32, 64)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_sparse(q, k, v, mode=self.mode, stride=self.stride, n_summaries=self.n_summaries, key_mask=key_mask)
