"""Gated attention unit (GAU): one attention head inside a gated feed-forward layer, which replaces attention and feed-forward layers.

u, v = silu(x W_u), silu(x W_v)  (N, e);   z = silu(x W_z)  (N, s);   q = z ⊙ g_q + b_q,   k = z ⊙ g_k + b_k
A = scores normalised in one of four ways (see `weights`),   y = (u ⊙ A v) W_o
Hua et al. 2022, arXiv:2202.10447, eqs. 3-6. `valid` and `softmax_plus`: Su et al. 2022 (GAU-α). Widths: s = D_k, e = D_v.
3 D e + D s weights, O(N² (s + e)) time. With e = 2 D, two units replace one transformer block, which has 12 D² weights.
"""

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.capabilities import Capabilities
from models.attention.layers.encoder import EncoderLayer
from models.attention.layers.mechanism import Cost, Mechanism
from models.attention.layers.multi_head import both_masks, head_width
from models.attention.layers.scaled_dot_product import masked_softmax, scale_of
from models.parts.positions import Rotation, distance_buckets, rotate

SILU_IS_1 = 1.2784645427610738  # silu(SILU_IS_1) = 1
Normalisation = Literal["length", "valid", "softmax", "softmax_plus"]


def weights(
    q: Tensor,
    k: Tensor,
    *,
    normalisation: Normalisation = "valid",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    length: int | None = None,
    least_length: int = 1,
    scale: float | None = None,
    log_base: float = 512,
) -> Tensor:
    """Return the attention weights A (.., N_q, N_k) of q (.., N_q, s) and k (.., N_k, s), normalised in one of four ways.

    mask (bool, True = attend) and bias b broadcast to the shape of A.

    length        relu((q . k + b) / length)²,   where length defaults to N_k, including masked keys
    valid         relu(scale q . k + b)² / l,   l = the number of keys that the query may attend to
    softmax       softmax(scale q . k + b)
    softmax_plus  softmax(log(max(l, least_length)) / log(log_base) scale q . k + b),   equal to softmax at l = log_base
    The row of a query that may attend to no key is 0. Other rows sum to 1 only with `softmax` and `softmax_plus`. `scale` defaults to
    s^-1/2. The normalisation `length` does not use it.
    """
    scores = q @ k.mT
    if mask is None:
        mask = torch.ones_like(scores[..., :1, :], dtype=torch.bool)
    if normalisation != "length":
        scores = scores * scale_of(q, scale)
    n_seen = mask.sum(-1, keepdim=True).clamp_min(1)  # l
    if normalisation == "softmax_plus":
        scores = scores * (n_seen.clamp_min(least_length).to(scores.dtype).log() / math.log(log_base))
    if bias is not None:
        scores = scores + bias
    if normalisation in ("softmax", "softmax_plus"):
        return masked_softmax(scores, mask)
    if normalisation == "length":
        scores = scores / (k.shape[-2] if length is None else length)
    A = F.relu(scores).square() * mask
    return A if normalisation == "length" else A / n_seen


class DistanceBias(nn.Module):
    """A learned bias, times `scale`, for each bucket of distances key - query, for sequences of any length.

    The buckets are those of T5 (Raffel et al. 2019).
    """

    bucket_of: Tensor

    def __init__(self, *, scale: float, causal: bool, n_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.scale = scale
        self.max_distance = max_distance  # longer distances share one bucket
        self.weight = nn.Parameter(torch.zeros(n_buckets))
        distances = torch.arange(-max_distance, max_distance + 1)
        self.register_buffer("bucket_of", distance_buckets(distances, n_buckets, max_distance, causal=causal), persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """Return the bias of each distance: int64 of any shape -> float of the same shape."""
        rows = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return (self.weight * self.scale)[self.bucket_of[rows]]


class GatedProjections(Mechanism):
    """Base of the gated units: to_u, to_v (D -> e), to_z (D -> s), to_out (e -> D), and n_maps affine maps of z.

    A unit has one head. s is d_head, or D / n_heads if d_head is None: n_heads has no other effect than this width. e is expansion · D.
    interleaved: which pairs of columns are rotated, see `rotate` in models/parts/positions.py.
    """

    gates = (("to_u", SILU_IS_1),)
    value_of_one = SILU_IS_1

    def __init__(
        self, d_model: int, n_heads: int, *, d_head: int | None, bias: bool | None, expansion: int, n_maps: int, interleaved: bool = False
    ) -> None:
        super().__init__()
        bias = self.biased if bias is None else bias
        self.interleaved = interleaved
        self.d_head = head_width(d_model, n_heads, d_head)
        self.d_value = expansion * d_model
        self.to_u = nn.Linear(d_model, self.d_value, bias=bias)
        self.to_v = nn.Linear(d_model, self.d_value, bias=bias)
        self.to_z = nn.Linear(d_model, self.d_head, bias=bias)
        self.to_out = nn.Linear(self.d_value, d_model, bias=bias)
        self.gain = nn.Parameter(0.02 * torch.randn(n_maps, 1, self.d_head))
        self.offset = nn.Parameter(torch.zeros(n_maps, 1, self.d_head)) if bias else None

    def projected(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return u (B, N, e), v (B, 1, N, e) and the affine maps of z, rotated, each (B, 1, N, s): x (B, N, D).

        u has the dtype of x. v and the maps are float32 at least.
        """
        exact = torch.promote_types(x.dtype, torch.float32)
        v = F.silu(self.to_v(x)).unsqueeze(1).to(exact)
        z = F.silu(self.to_z(x)).unsqueeze(1)
        maps = z * self.gain[:, None, None] if self.offset is None else z * self.gain[:, None, None] + self.offset[:, None, None]
        each = maps.to(exact).unbind(0)  # the affine maps, (B, 1, N, s) each
        return F.silu(self.to_u(x)), v, [y if rotation is None else rotate(y, rotation, interleaved=self.interleaved) for y in each]

    def enlarge(self) -> None:
        nn.init.normal_(self.gain)

    def gated(self, u: Tensor, o: Tensor) -> Tensor:
        """Return the output (u ⊙ o) W_o: u (B, N, e), o (B, 1, N, e) -> (B, N, D)."""
        return self.to_out(u * o.squeeze(1).to(u.dtype))


class GatedAttentionUnit(GatedProjections, EncoderLayer):
    """The GAU for encoders without its norm and residual, so that it can replace an attention layer.

    bias: False also removes the biases b_q and b_k of q and k. relative_bias: T5's relative bias, times sqrt(D), is added to the scores.
    Raises ValueError for a normalisation that `weights` does not have.
    """

    capabilities = Capabilities(cross=False, rotates=True, ordered=True, averages=False)
    cost = Cost("O(N² (s + e))", lambda N, s: N * N * (s.D_k + 2 * s.D))

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        d_head: int | None = None,
        bias: bool = True,
        expansion: int = 2,
        normalisation: Normalisation = "valid",
        relative_bias: bool = True,
        least_length: int = 1,
        interleaved: bool = False,
    ) -> None:
        super().__init__(d_model, n_heads, d_head=d_head, bias=bias, expansion=expansion, n_maps=2, interleaved=interleaved)
        if normalisation not in get_args(Normalisation):
            raise ValueError(f"normalisation={normalisation!r} is not one of {', '.join(get_args(Normalisation))}")
        self.normalisation = normalisation
        self.capabilities = replace(self.capabilities, averages=normalisation in ("softmax", "softmax_plus"))
        self.least_length = least_length
        self.bias = DistanceBias(scale=d_model**0.5, causal=False) if relative_bias else None

    def mix(self, x: Tensor, key_mask: Tensor | None, rotation: Rotation | None) -> Tensor:
        u, v, (q, k) = self.projected(x, rotation)
        t = torch.arange(x.shape[1], device=x.device)
        bias = None if self.bias is None else self.bias(t - t[:, None])  # (N, N)
        A = weights(q, k, normalisation=self.normalisation, mask=both_masks(key_mask, None), bias=bias, least_length=self.least_length)
        return self.gated(u, A @ v)
