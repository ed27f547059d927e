"""xPos: rotary positions with decay. The score of each pair of columns decreases with the distance at a rate of its own.

q_i at t_q and k_i at t_k are rotated as in rotary positions (positions.py) and multiplied by ζ_i^(t_q / s) and ζ_i^(-t_k / s):
score = sum_i ζ_i^((t_q - t_k) / s) (q_i rotated by t_q) . (k_i rotated by t_k)
with ζ_i = (2i / D_k + γ) / (1 + γ) for pairs i = 0 .. D_k/2 - 1
Sun et al. 2022, arXiv:2212.10554: γ = 0.4, s = 512. It is only for causal attention, since the scores of keys after the query would
grow with their distance. Retention with a rotation has the same form, with one rate per head (retention.py).
"""

import torch
from torch import Tensor

from models.parts.positions import Rotation


def xpos(rotation: Rotation, t: Tensor, *, gamma: float = 0.4, scale_base: float = 512.0) -> tuple[Rotation, Rotation]:
    """Return the scaled rotations of queries and of keys, for `positions.rotate`: rotation (.., N, D_k/2), positions t (.., N).

    scale_base: s, in tokens. Only differences of t matter, and t may be negative. ζ^(t / s) reaches 10^±9 at |t| = 8,192 and
    overflows float32 near 35,000, so in a long text count t from the middle. Raises ValueError if γ or s is not above 0.
    """
    if gamma <= 0 or scale_base <= 0:
        raise ValueError(f"gamma={gamma} and scale_base={scale_base} must be above 0: the first pair of columns has ζ = γ / (1 + γ)")
    n_pairs = rotation.cos.shape[-1]
    zeta = (torch.arange(n_pairs, dtype=torch.float64, device=t.device) / n_pairs + gamma) / (1 + gamma)
    grown = (t.unsqueeze(-1) / scale_base * zeta.log()).exp().to(rotation.cos.dtype)  # (.., N, D_k/2)
    return Rotation(rotation.cos * grown, rotation.sin * grown), Rotation(rotation.cos / grown, rotation.sin / grown)
