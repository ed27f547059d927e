"""Feature maps φ of linear attention, by name: they replace the softmax's exponential, so that a sum over keys can be kept.

elu           elu(x) + 1                 Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7
relu          max(x, 0)                  the same paper's remark on eq. 7: its gradient is 0 for x < 0
relu_squared  max(x, 0)²                 sharper: a pair counts by its largest common columns
exp           e^x, x up to 30            φ(q)ᵀφ(k) = sum_d exp(q_d + k_d)
taylor_1      [1, x / |x|]               φ(q)ᵀφ(k) = 1 + cos(q, k) >= 0: e^s up to its first power
taylor_2      `based.taylor`             1 + s + s²/2 with s = qᵀk / √D_k: up to its second

Each is (.., D_k) -> (.., D_φ), never negative in its products. relu and relu_squared may give a query no weight at all, and it then gets 0;
so does elu for x below -87 in float32, where e^x is 0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention.layers.causal import at_least_float32
from models.attention.linear.based import taylor

LARGEST_EXPONENT = 30.0  # e^(30 + 30) a column leaves room in float32, which ends at e^88, for sums over columns, tokens and values


def elu_plus_one(x: Tensor) -> Tensor:
    """D_φ = D_k. Not as `elu(x) + 1`: e^x - 1 + 1 loses the digits of a small e^x, and is 0 from x = -18 on in float32."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def relu_squared(x: Tensor) -> Tensor:
    """D_φ = D_k. In float32 at least: 256² is more than float16 holds."""
    x = F.relu(x.to(at_least_float32(x.dtype)))
    return x * x


def exp(x: Tensor) -> Tensor:
    """D_φ = D_k. In float32 at least."""
    return x.to(at_least_float32(x.dtype)).clamp(max=LARGEST_EXPONENT).exp()


def taylor_1(x: Tensor) -> Tensor:
    """D_φ = 1 + D_k. In float32 at least; a vector of length 0 has no direction and gives [1, 0]."""
    x = F.normalize(x.to(at_least_float32(x.dtype)), dim=-1, eps=1e-6)
    return torch.cat([torch.ones_like(x[..., :1]), x], dim=-1)


def taylor_2(x: Tensor) -> Tensor:
    """D_φ = 1 + D_k + D_k². In float32 at least."""
    return taylor(x.to(at_least_float32(x.dtype)))


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_plus_one,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "exp": exp,
    "taylor_1": taylor_1,
    "taylor_2": taylor_2,
}

MAY_BE_ZERO = ("relu", "relu_squared")  # may give a query no weight at all


def map_named(name: str) -> Callable[[Tensor], Tensor]:
    """Raises ValueError for a name that is not in the table."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is not one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def n_features(name: str, d_head: int) -> int:
    """D_φ of the map for heads of this width."""
    return map_named(name)(torch.zeros(1, d_head)).shape[-1]
