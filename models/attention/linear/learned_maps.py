"""Trained feature maps φ, one for each head: a linear map of x' = x D_k^(-1/4), followed by a function for which φ(q)ᵀφ(k) >= 0.

elu       elu(W x' + b) + 1                        D_φ = D_k              initially W = I and b = 0
hedgehog  softmax([W x' + b, -(W x' + b)])         D_φ = 2 D_k            initially W = I, b = 0; Zhang et al. 2024, arXiv:2402.04347
taylor    [1, y, vec(y yᵀ) / √2], y = W x' + b     D_φ = 1 + D_k + D_k²   initially W = I, b = 0; Arora et al. 2024, arXiv:2402.18668
positive  exp(W x' + b - |x'|² / 2) / √D_φ         D_φ = 2 D_k            W as in the Performer, so that initially φ(q)ᵀφ(k) has the
                                                   mean exp(qᵀk / √D_k); Choromanski et al. 2020, arXiv:2009.14794
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from models.attention.linear.based import taylor
from models.attention.linear.feature_maps import LARGEST_EXPONENT, elu_plus_one
from models.attention.linear.random_features import draw_projection

Kind = Literal["elu", "hedgehog", "taylor", "positive"]


class LearnedMap(nn.Module):
    """A feature map φ for every head: (B, H, N, D_k) -> (B, H, N, D_φ). Raises ValueError if the kind is unknown."""

    def __init__(self, kind: Kind, n_heads: int, d_head: int, *, seed: int = 0) -> None:
        super().__init__()
        if kind not in FUNCTIONS:
            raise ValueError(f"feature_map={kind!r} is not one of {', '.join(FUNCTIONS)}")
        self.kind, self.scale = kind, d_head**-0.25
        weight = torch.eye(d_head)
        if kind == "positive":
            weight = draw_projection(2 * d_head, d_head, torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight.repeat(n_heads, 1, 1))  # (H, D_w, D_k)
        self.bias = nn.Parameter(torch.zeros(n_heads, 1, weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.kind](x, *self._parameters_for(x))

    @property
    def has_log(self) -> bool:
        """Whether every feature is an exponential, so that `log` can return its exponents."""
        return self.kind == "positive"

    def log(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Return log φ(x), for a map with `has_log`. present bool (B, 1, N, 1): True at tokens; elsewhere the result is about -10³⁸."""
        return _log_positive(x, *self._parameters_for(x), present)

    def _parameters_for(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        return self.weight.to(x.dtype) * self.scale, self.bias.to(x.dtype), self.scale


def _elu(x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    return elu_plus_one(x @ weight.mT + bias)


def _hedgehog(x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    y = x @ weight.mT + bias
    return torch.softmax(torch.cat([y, -y], dim=-1), dim=-1)


def _taylor(x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    return taylor((x @ weight.mT + bias) / scale)  # `taylor` scales its input itself


def _positive(x: Tensor, weight: Tensor, bias: Tensor, scale: float) -> Tensor:
    return _log_positive(x, weight, bias, scale).clamp(max=LARGEST_EXPONENT).exp()


def _log_positive(x: Tensor, weight: Tensor, bias: Tensor, scale: float, present: Tensor | None = None) -> Tensor:
    """Return log φ(x) of the map `positive`, W x' + b - |x'|² / 2 - log √D_φ. At absent tokens it is about -10³⁸.

    All terms, and the mask `present`, are columns of a single matrix product, which is faster than to add them one after the other.
    """
    halves = (x * x).sum(-1, keepdim=True) * (scale**2 / 2)  # |x'|² / 2
    if present is not None:
        halves = torch.where(present, halves, -torch.finfo(x.dtype).min / 4)  # a quarter of the limit, so that sums do not overflow
    x = torch.cat([x, halves, torch.ones_like(halves)], dim=-1)  # (B, H, N, D_k + 2)
    bias = (bias - math.log(weight.shape[1]) / 2).mT  # (H, D_φ, 1)
    return x @ torch.cat([weight, torch.full_like(bias, -1.0), bias], dim=-1).mT


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {  # arguments: x, W D_k^(-1/4), b, D_k^(-1/4)
    "elu": _elu,
    "hedgehog": _hedgehog,
    "taylor": _taylor,
    "positive": _positive,
}
