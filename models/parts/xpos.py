"""xPos: a rotation that also fades, so that a score grows smaller with the distance, each pair of columns at its own rate.

q_i at t_q and k_i at t_k turn as by rotary positions (positions.py), and are as long as before times ζ_i^(t_q / s) and ζ_i^(-t_k / s):
score = sum_i ζ_i^((t_q - t_k) / s) (q_i turned by t_q) . (k_i turned by t_k),   ζ_i = (2i / D_k + γ) / (1 + γ) for pairs i = 0 .. D_k/2 - 1
Sun et al. 2022, arXiv:2212.10554: γ = 0.4, s = 512. It looks back only: for keys to come, the score would grow. Retention
with a rotation has the same form, with one rate a head (retention.py).
"""

import torch
from torch import Tensor

from models.parts.positions import Rotation


def xpos(rotation: Rotation, t: Tensor, *, gamma: float = 0.4, scale_base: float = 512.0) -> tuple[Rotation, Rotation]:
    """Angles (.., N, D_k/2) of tokens at t (.., N) -> the rotations of queries and of keys, for `positions.rotate`.

    scale_base: s, in tokens. Only differences of t count, and it may be negative: ζ^(t / s) is 10^±9 at |t| = 8,192 and leaves float32 at
    some 35,000, so count from the middle of a long text. Raises ValueError for a γ or s that is not above 0.
    """
    if gamma <= 0 or scale_base <= 0:
        raise ValueError(f"gamma={gamma} and scale_base={scale_base} must be above 0: the first pair of columns has ζ = γ / (1 + γ)")
    n_pairs = rotation.cos.shape[-1]
    zeta = (torch.arange(n_pairs, dtype=torch.float64, device=t.device) / n_pairs + gamma) / (1 + gamma)
    grown = (t.unsqueeze(-1) / scale_base * zeta.log()).exp().to(rotation.cos.dtype)  # (.., N, D_k/2)
    return Rotation(rotation.cos * grown, rotation.sin * grown), Rotation(rotation.cos / grown, rotation.sin / grown)
