"""ScaleNorm: a vector at a length that is learned, one number for all its columns.

y = g sqrt(D) x / |x|
Nguyen & Salazar 2019, arXiv:1910.05895, whose g is g sqrt(D) here, so that it begins at 1: RMSNorm with one weight in place of D. Used with
gated attention units by Hua et al. 2022, arXiv:2202.10447.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ScaleNorm(nn.Module):
    """(.., D) -> (.., D), with the one weight g. eps is added to the mean of the squares, so that 0 stays 0."""

    def __init__(self, d_model: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.d_model, self.eps = d_model, eps
        self.g = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.d_model,), self.g.expand(self.d_model), self.eps)
