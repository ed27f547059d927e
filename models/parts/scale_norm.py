"""ScaleNorm: it scales a vector to a learned length, with one weight for all columns.

y = g sqrt(D) x / |x|
Nguyen & Salazar 2019, arXiv:1910.05895. The g of the paper is g sqrt(D) here, so that g can be initialised with 1. ScaleNorm is
RMSNorm with one weight instead of D weights. Hua et al. 2022, arXiv:2202.10447, use it with gated attention units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ScaleNorm(nn.Module):
    """A norm with a single weight g: (.., D) -> (.., D). eps is added to the mean of the squares, so that 0 remains 0."""

    def __init__(self, d_model: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.d_model, self.eps = d_model, eps
        self.g = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.d_model,), self.g.expand(self.d_model), self.eps)
