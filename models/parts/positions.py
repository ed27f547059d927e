"""Position encodings: tables that are added to embeddings, rotations of q and k, and biases on scores.

Tables are computed once for N_max positions, in float64, and looked up by position, so that N can vary in an exported
graph.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(n_positions: int, d_model: int) -> Tensor:
    """Return sinusoidal embeddings (N_max, D) float64: e[t, 2i] = sin(t / 10000^(2i/D)), e[t, 2i+1] = cos(t / 10000^(2i/D)).

    Vaswani et al. 2017, section 3.5. Sines and cosines alternate. Other code stores all sines first. Trained weights are only valid
    with the order with which they were trained.
    """
    return sinusoids_at(torch.arange(n_positions), d_model)


def sinusoids_at(t: Tensor, d_model: int) -> Tensor:
    """Return the rows t of `sinusoids`: positions t (..) int64 -> (.., D) float64."""
    angles = _angles(t, d_model, base=10_000.0)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :d_model]


def positions_after_padding(input_ids: Tensor, padding_id: int) -> Tensor:
    """Return positions, (B, N) -> (B, N) int64: padding_id + 1, padding_id + 2, .. for tokens, and padding_id for padding.

    Same as fairseq's `make_positions`, with which RoBERTa and MPNet were trained.
    """
    is_token = (input_ids != padding_id).long()
    return is_token.cumsum(1) * is_token + padding_id


class Rotation(NamedTuple):
    """The cosines and sines of the rotation angles of N positions, (N, D_k/2) each.

    Layers that attend to a window and to the first tokens also read t (B, N) int64, the positions, and `near`, by the size of a window the
    rotation of the positions min(t, window - 1).
    """

    cos: Tensor
    sin: Tensor
    t: Tensor | None = None
    near: "Mapping[int, Rotation] | None" = None

    def within(self, window: int) -> "Rotation":
        """Return the rotation of the positions min(t, window - 1), or this one if there is none of a window."""
        return self if self.near is None else self.near[window]


def rotate(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate the pair (x_i, x_{i + D_k/2}) of a token at position t by the angle t base^(-2i/D_k): (B, H, N, D_k) -> same.
    Columns for which `rotation` has no angles are unchanged (Wang & Komatsuzaki 2021, GPT-J).

    Su et al. 2021, arXiv:2104.09864, eq. 34, but with columns paired as in GPT-NeoX, as ModernBERT and Nomic were trained.
    `interleaved` rotates x_2i with x_{2i+1} as in the paper, which is equivalent up to a permutation of the rows of W^Q and
    W^K. The score of a query at t_q and a key at t_k then depends on t_q - t_k only.
    """
    width = 2 * rotation.cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], rotation, interleaved=interleaved), x[..., width:]], dim=-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    turned = [first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin]
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def rotation_at(t: Tensor, d_head: int, *, base: float, dtype: torch.dtype) -> Rotation:
    """Return the rotations of positions t for `rotate`: (B, N) int64 -> (B, 1, N, D_k/2)."""
    angles = _angles(t, d_head, base=base).unsqueeze(1)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


class RotationTable(nn.Module):
    """A table of the rotations of positions 0 .. N_max - 1. Raises ValueError for an odd head width."""

    def __init__(self, n_positions: int, d_head: int, *, base: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if d_head % 2:
            raise ValueError(f"d_head={d_head} is odd, but a rotation needs pairs of columns; choose an even width")
        angles = _angles(torch.arange(n_positions), d_head, base=base)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)  # (N_max, D_k/2)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, t: Tensor) -> Rotation:
        """Return the rotations of positions t (N,) int64."""
        return Rotation(F.embedding(t, self.cos), F.embedding(t, self.sin))


class RelativeBias(nn.Module):
    """A learned bias on attention scores, for each head and each distance between key and query, shared by all layers.

    Each small distance has its own bucket, larger ones share buckets of growing width, and all distances beyond `max_distance` share the
    last bucket. Keys before the query and keys after it have different buckets. With `causal`, all buckets are for keys before the query.
    Raffel et al. 2019 (T5), arXiv:1910.10683, section 2.1. `scale` multiplies the learned numbers: 1 in T5, sqrt(D) in a gated
    attention unit (Hua et al. 2022, arXiv:2202.10447).
    """

    def __init__(
        self, n_positions: int, n_heads: int, *, n_buckets: int = 32, max_distance: int = 128, causal: bool = False, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.n_positions = n_positions
        self.scale = scale
        self.weight = nn.Parameter(torch.zeros(n_buckets, n_heads))
        distances = torch.arange(1 - n_positions, n_positions)  # key position - query position
        buckets = distance_buckets(distances, n_buckets, max_distance, causal=causal)
        self.bucket_of: Tensor
        self.register_buffer("bucket_of", buckets, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """Return the biases of positions t (N,) int64: (1, H, N, N), [.., query, key]."""
        distances = t[None, :] - t[:, None]  # (N, N)
        buckets = self.bucket_of[distances + self.n_positions - 1]
        return F.embedding(buckets, self.scale * self.weight).permute(2, 0, 1).unsqueeze(0)


def distance_buckets(distances: Tensor, n_buckets: int, max_distance: int, *, causal: bool = False) -> Tensor:
    """Return the bucket numbers of distances key - query: any shape -> same shape, int64.

    Half of the buckets are for keys after the query. With `causal`, all buckets are for keys before the query. Keys after it, which
    are masked anyway, then get bucket 0 like the query's own token.

    The logarithm is computed in float32, as in training, because at exact powers of two its rounding decides the bucket.
    """
    if causal:
        return _buckets_of_a_side(-distances.clamp_max(0), n_buckets, max_distance)
    n_side = n_buckets // 2
    return (distances > 0).long() * n_side + _buckets_of_a_side(distances.abs(), n_side, max_distance)


def _buckets_of_a_side(gaps: Tensor, n_buckets: int, max_distance: int) -> Tensor:
    """Map distances >= 0 to 0 .. n_buckets - 1: one bucket per distance in the first half, logarithmic buckets in the second."""
    n_exact = n_buckets // 2
    log_steps = torch.log(gaps.clamp_min(1).float() / n_exact) / math.log(max_distance / n_exact) * (n_buckets - n_exact)
    coarse = (n_exact + log_steps.long()).clamp_max(n_buckets - 1)
    return torch.where(gaps < n_exact, gaps, coarse)


def _angles(t: Tensor, width: int, *, base: float) -> Tensor:
    """Return the angles t * base^(-2i/width), (.., ceil(width/2)), in radians. They are float64, since in float32 they would be wrong by
    0.06 at position 10⁶.
    """
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=t.device) / width)
    return t.unsqueeze(-1) * frequencies
