"""Initial decay rates of the heads, as half-lives: after T tokens, the contribution of a token to the state has decayed to one half.

log-decay = -ln 2 / T. A layer has heads of short and of long half-lives, as with retention's γ_h, and training changes them.
"""

import math

import torch
from torch import Tensor

SHORTEST, LONGEST = 10.0, 1000.0  # half-lives in tokens


def log_decays(n_heads: int) -> Tensor:
    """Return the log-decay of each head, (H,) float64, negative. The half-lives form a geometric series from SHORTEST to LONGEST."""
    half_lives = torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), n_heads, dtype=torch.float64)
    return -math.log(2) / half_lives
