"""Feature maps φ of linear attention, by name. exp(q . k) is replaced by φ(q)ᵀφ(k), so that one sum over the keys serves all queries.

elu           elu(x) + 1                 Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7
relu          max(x, 0)                  in a remark on eq. 7 of the same paper; its gradient is 0 for x < 0
relu_squared  max(x, 0)²                 sharper than relu: the columns that are large in both q and k dominate φ(q)ᵀφ(k)
exp           e^x, with x clamped to 30  φ(q)ᵀφ(k) = sum_d exp(q_d + k_d)
taylor_1      [1, x / |x|]               φ(q)ᵀφ(k) = 1 + cos(q, k) >= 0: the Taylor series of e^s up to its first power
taylor_2      `taylor` of based.py       φ(q)ᵀφ(k) = 1 + s + s²/2, s = qᵀk / √D_k: the Taylor series of e^s up to its second power

Each map takes (.., D_k) to (.., D_φ), and φ(q)ᵀφ(k) is never negative. With relu and relu_squared all weights of a query can be 0, and
then its output is 0. The same happens with elu for x below -87 in float32, where e^x is 0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.causal import at_least_float32
from models.attention.linear.based import taylor

LARGEST_EXPONENT = 30.0  # so a product of two features is at most e^60; the largest float32 is e^88, which leaves room for sums


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1. D_φ = D_k. F.elu(x) + 1 would round a small e^x, to 0 for x < -18 in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)², in float32 at least, because 256² overflows float16. D_φ = D_k."""
    x = F.relu(x.to(at_least_float32(x.dtype)))
    return x * x


def exp(x: Tensor) -> Tensor:
    """Return e^x with x clamped to 30, in float32 at least. D_φ = D_k."""
    return x.to(at_least_float32(x.dtype)).clamp(max=LARGEST_EXPONENT).exp()


def taylor_1(x: Tensor) -> Tensor:
    """Return [1, x / |x|], in float32 at least; [1, 0] for x of length 0. D_φ = 1 + D_k."""
    x = F.normalize(x.to(at_least_float32(x.dtype)), dim=-1, eps=1e-6)
    return torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)


def taylor_2(x: Tensor) -> Tensor:
    """Return the second-order Taylor features of `taylor` in based.py, in float32 at least. D_φ = 1 + D_k + D_k²."""
    return taylor(x.to(at_least_float32(x.dtype)))


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_plus_one,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "exp": exp,
    "taylor_1": taylor_1,
    "taylor_2": taylor_2,
}

MAY_BE_ZERO = ("relu", "relu_squared")  # with these maps all weights of a query can be 0


def map_named(name: str) -> Callable[[Tensor], Tensor]:
    """Return the feature map of this name. Raises ValueError if there is none."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is not one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def n_features(name: str, d_head: int) -> int:
    """Return D_φ, the number of features of the named map, for heads of width `d_head`."""
    return map_named(name)(torch.zeros(1, d_head)).shape[-1]
