"""Initial decay rates of the heads, as half-lives: after T tokens, the contribution of a token to the state has decayed to one half.

log-decay = -ln 2 / T. As in retention, whose heads have different γ_h, some heads of a layer have short half-lives and others long ones.
Unlike those of retention, they change in training.
"""

import math

import torch
from torch import Tensor

SHORTEST, LONGEST = 10.0, 1000.0  # half-lives in tokens


def log_decays(n_heads: int) -> Tensor:
    """Return the log-decay of each head, (H,) float64, negative. The half-lives form a geometric series from SHORTEST to LONGEST."""
    half_lives = torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), n_heads, dtype=torch.float64)
    return -math.log(2) / half_lives
