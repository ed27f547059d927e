"""Locality-sensitive hashing: vectors of nearly the same direction mostly get the same bucket.

Angular:     h(x) = argmax [xR ; -xR] in 0 .. n_b - 1,   R (D_k, n_b / 2) ~ N(0, 1): the nearest of n_b random directions
factorised:  h(x) = h_1(x) + f_1 h_2(x) + f_1 f_2 h_3(x) + ..,   where h_i is angular with f_i buckets, so n_b = f_1 f_2 f_3 ..
             and R has only (f_1 + f_2 + ..) / 2 columns
Hyperplanes: h(x) = the bits sign(xP); two vectors at an angle θ are on the same side of a plane with probability 1 - θ/π

Kitaev et al. 2020, arXiv:2001.04451, section 2; Andoni et al. 2015, arXiv:1509.02897; Charikar 2002 (hyperplanes).
A round of hashing costs O(N D_k n_b), or O(N D_k (f_1 + f_2 + ..)) if factorised. No gradient flows through a bucket.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Buckets = int | Sequence[int]  # the number of buckets n_b, or the factors of this number


def draw_rotations(n_heads: int, n_rounds: int, d_head: int, n_buckets: Buckets, *, seed: int) -> Tensor:
    """Draw the matrices of angular hashing for every head and round: (H, n_rounds, D_k, columns).

    columns: half of n_buckets or, if factors are given, half of their sum. Raises ValueError if n_buckets or a factor is odd.
    """
    if n_rounds < 1:
        raise ValueError(f"n_rounds={n_rounds} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_heads, n_rounds, d_head, sum(factors_of(n_buckets)) // 2, generator=generator)


def factors_of(n_buckets: Buckets) -> tuple[int, ...]:
    """Return the factors of n_buckets. Raises ValueError if a factor is odd, because directions come in opposite pairs."""
    factors = (n_buckets,) if isinstance(n_buckets, int) else tuple(n_buckets)
    if not factors or any(factor < 2 or factor % 2 for factor in factors):
        raise ValueError(f"n_buckets={n_buckets} must be even and at least 2, in every factor; take the next even number")
    return factors


def angular_buckets(x: Tensor, rotations: Tensor, n_buckets: Buckets | None = None) -> Tensor:
    """Return the angular bucket of each vector in each of R rounds, int64 (B, H, R, N). In a tie it is the lowest bucket.

    x (B, H, N, D_k), rotations (H or 1, R, D_k, columns).

    n_buckets defaults to twice the number of columns. Raises ValueError if n_buckets does not fit the number of columns.
    """
    factors = factors_of(2 * rotations.shape[-1] if n_buckets is None else n_buckets)
    if sum(factors) != 2 * rotations.shape[-1]:
        raise ValueError(f"n_buckets={n_buckets} needs rotations with {sum(factors) // 2} columns, not {rotations.shape[-1]}")
    turned = _projections(x, rotations)
    buckets, stride = torch.zeros_like(turned[..., 0], dtype=torch.int64), 1
    for part, factor in zip(turned.split([factor // 2 for factor in factors], dim=-1), factors, strict=True):
        buckets = buckets + stride * torch.cat([part, -part], dim=-1).argmax(-1)
        stride *= factor
    return buckets


def hyperplane_buckets(x: Tensor, planes: Tensor) -> Tensor:
    """Return hyperplane buckets: x (B, H, N, D_k), planes (H or 1, R, D_k, bits) -> int64 (B, H, R, N).

    planes: the normals of the planes. Bit b of a bucket is 1 if x is on the positive side of plane b.
    """
    above = _projections(x, planes) > 0
    return (above * 2 ** torch.arange(planes.shape[-1], device=x.device)).sum(-1)


def _projections(x: Tensor, directions: Tensor) -> Tensor:
    """Return the projections of x, (B, H, R, N, columns), in float32 at least, so that rounding changes as few buckets as possible."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to(exact).unsqueeze(2) @ directions.to(exact)
