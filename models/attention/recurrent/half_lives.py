"""How long a head remembers when training begins: after a half-life of T tokens, half of what was written is left.

log-decay = -ln 2 / T. Heads of short and long memory stand side by side, as in retention's γ_h; training moves them.
"""

import math

import torch
from torch import Tensor

SHORTEST, LONGEST = 10.0, 1000.0  # tokens


def log_decays(n_heads: int) -> Tensor:
    """(H,) float64, negative: half-lives in equal ratios from SHORTEST to LONGEST."""
    half_lives = torch.logspace(math.log10(SHORTEST), math.log10(LONGEST), n_heads, dtype=torch.float64)
    return -math.log(2) / half_lives
