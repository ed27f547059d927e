"""Disentangled attention: beside the contents of both tokens, a score compares the content of each with their distance.

(a) A_ij = q_i . k_j + q_i . r^k_δ(i,j) + k_j . r^q_δ(i,j),   r^k = R W^K,   r^q = R W^Q;   content to content, to position, and reverse
(b) o_i = sum_j p_ij v_j,   p_i = softmax_j(A_ij / sqrt(3 D_k));   3 is the number of terms in (a)
(c) δ(i, j) = clamp(i - j, -s, s - 1) + s is the row of R (2 s, D), a learned vector for each distance
(d) With buckets, δ(i, j) = clamp(b(i - j), -s, s - 1) + s: distances up to s / 2 have a row each, larger ones share rows of growing width
He et al. 2020, arXiv:2006.03654, eqs. 2 to 4 (the paper has δ(j, i) in the last term of (a); the authors' code and models have δ(i, j));
He et al. 2021, arXiv:2111.09543 (DeBERTaV3), whose layers share R and normalise it. O(N² D) time, as 2 N distances occur in N tokens.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities, of_nothing, refuse_cross
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import Cost, Examples
from models.attention.layers.multi_head import EqualHeads, both_masks, merge_heads, split_heads
from models.attention.layers.scaled_dot_product import masked_softmax

TERMS = ("c2p", "p2c")  # content to position: the second term of (a); position to content: the third


def attend_disentangled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    r_k: Tensor | None = None,
    r_q: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute disentangled attention: q, k (B, H, N, D_k), v (B, H, N, D_v) -> (B, H, N, D_v).

    r_k (H, 2 N, D_k) are the vectors of the distances i - j = N - 1, .., -N, and r_q (H, 2 N, D_k) those of 1 - N, .., N, each in the order
    in which a token meets the others. Without one of them, its term is absent. mask and bias are those of `scaled_dot_product.attend`.
    Raises ValueError if q, k and v differ in N.
    """
    refuse_cross("disentangled attention", q=q, k=k, v=v)
    if (nothing := of_nothing(q, k, v)) is not None:
        return nothing
    scale = (q.shape[-1] * (1 + (r_k is not None) + (r_q is not None))) ** -0.5
    q = q * scale
    scores = q @ k.mT  # (B, H, N, N)
    if r_k is not None:
        scores = scores + by_distance(q @ r_k.mT)
    if r_q is not None:
        scores = scores + by_distance((k * scale) @ r_q.mT).mT
    if bias is not None:
        scores = scores + bias
    return masked_softmax(scores, mask) @ v


def by_distance(x: Tensor) -> Tensor:
    """Return y (.., N, N) with y_ij = x_i,j-i+N-1: x (.., N, 2 N) has a column for each distance j - i = 1 - N, .., N."""
    N = x.shape[-2]
    flat = x.flatten(-2)[..., N - 1 : 2 * N * N - 1]
    return flat.reshape(*x.shape[:-2], N, 2 * N - 1)[..., :N]


def distance_rows(distances: Tensor, span: int, max_distance: int | None = None) -> Tensor:
    """Return δ: distances i - j, any shape, int64 -> rows 0 .. 2 span - 1, same shape. With `max_distance`, (d), otherwise (c). The
    logarithm is in float32, as in training, because its rounding decides the bucket of some distances.
    """
    if max_distance is not None:
        half = span // 2
        far = distances.abs().clamp_min(half)
        steps = torch.log(far / half) / torch.log(torch.tensor((max_distance - 1) / half)) * (half - 1)
        buckets = (torch.ceil(steps) + half).long() * distances.sign()
        distances = torch.where(far <= half, distances, buckets)
    return distances.clamp(-span, span - 1) + span


class DistanceVectors(nn.Module):
    """R, the vectors of distances, normalised."""

    def __init__(self, span: int, d_model: int, norm_eps: float) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * span, d_model)
        self.norm = nn.LayerNorm(d_model, eps=norm_eps)

    def forward(self) -> Tensor:
        """Return R (2 s, D)."""
        return self.norm(self.table.weight)


class DisentangledAttention(EqualHeads, EncoderLayer):
    """Multi-head disentangled self-attention for texts of up to n_positions tokens.

    span: s, rows of R on each side. max_distance: the distance at which the buckets of (d) reach the last row; None: (c). terms: those of
    `TERMS` that are added to the first term of (a). The layers of a model share R. Raises ValueError if options do not fit each other, or
    N > n_positions.
    """

    capabilities = Capabilities(cross=False, pairs=True, ordered=True)
    cost = Cost("O(N² D)", lambda N, s: 6 * N * N * s.D)  # 2 N distances in each of two terms, beside the products of contents
    examples = Examples({"n_positions": 140, "span": 8, "max_distance": 30})
    shared = ("relative",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool | None = None,
        n_positions: int = 512,
        span: int = 256,
        max_distance: int | None = 512,
        terms: Sequence[str] = TERMS,
        norm_eps: float = 1e-7,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias)
        if isinstance(terms, str) or not terms or set(terms) - set(TERMS) or len(set(terms)) < len(terms):
            raise ValueError(f"terms={terms!r} must be a list of some of {', '.join(TERMS)}, each at most once")
        if span < 2:
            raise ValueError(f"span={span} must be at least 2")
        if max_distance is not None and log(max(max_distance - 1, 1)) <= log(span // 2):
            raise ValueError(f"max_distance={max_distance} must be above span // 2 + 1 = {span // 2 + 1}, from which distances share rows")
        self.n_positions, self.terms = n_positions, tuple(terms)
        self.relative = DistanceVectors(span, d_model, norm_eps)
        distances = torch.arange(n_positions, -n_positions - 1, -1)
        self.rows: Tensor
        self.register_buffer("rows", distance_rows(distances, span, max_distance), persistent=False)  # (2 N_max + 1,)

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: None, *, pair_mask: Tensor | None, pair_bias: Tensor | None) -> Tensor:
        N = x.shape[1]
        if not torch.compiler.is_exporting() and self.n_positions < N:
            raise ValueError(f"N={N} tokens, but the layer has rows for n_positions={self.n_positions}; cut the input")
        q, k, v = self.heads(x)
        rows = self.rows[self.n_positions - N : self.n_positions + N + 1]  # (2 N + 1,), of the distances N .. -N
        R = self.relative()
        r_k = self._of_distances(self.to_k(R), rows[1:]) if "c2p" in self.terms else None
        r_q = self._of_distances(self.to_q(R), rows[:-1].flip(0)) if "p2c" in self.terms else None
        o = attend_disentangled(q, k, v, r_k=r_k, r_q=r_q, mask=both_masks(key_mask, pair_mask), bias=pair_bias)
        return self.to_out(merge_heads(o))

    def _of_distances(self, r: Tensor, rows: Tensor) -> Tensor:
        """Return the heads of the projected vectors of distances: (2 s, H D_k) and rows (2 N,) -> (H, 2 N, D_k)."""
        return split_heads(nn.functional.embedding(rows, r).unsqueeze(0), self.n_heads)[0]
