"""Low-rank changes of a layer's projections: W + scale B A, of which A (r, D_in) and B (D_out, r) are trained and W is not.

Hu et al. 2021 (LoRA), arXiv:2106.09685. A is drawn and B is 0, so that nothing is changed at first. The product is added to W in every
call: that costs less than a second path through the activations, and is how the student is saved.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Factors(nn.Module):
    """The factors of a change: `down` is A, `up` is B. Raises ValueError unless 1 <= rank <= both widths of the projection."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        if not 1 <= rank <= (most := min(linear.in_features, linear.out_features)):
            raise ValueError(f"rank={rank} must be from 1 to {most}, the smaller width of the projection")
        like = linear.weight
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, dtype=like.dtype).to(like.device) * (3 * linear.in_features) ** -0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=like.dtype, device=like.device))


class ChangedLinear(nn.Module):
    """A projection with a low-rank change."""

    def __init__(self, linear: nn.Linear, factors: Factors, scale: float) -> None:
        super().__init__()
        self.linear, self.factors, self.scale = linear, factors, scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, merged(self.linear.weight, self.factors.down, self.factors.up, self.scale), self.linear.bias)


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + scale B A: weight (D_out, D_in), down (r, D_in), up (D_out, r). `weight` is not changed."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight, up, down, alpha=scale)
