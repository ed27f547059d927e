"""The scores of each kind of Synthesizer: as functions of given weights, and as modules that hold the weights.

Equations and paper: synthesizer.py. The initial weights give scores of variance about 1 for tokens of variance 1. A module is called
with x (B, N, D), the tokens' positions t (B or 1, N) and the number of keys N_k, and returns (B or 1, H, N, N_k).
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from models.attention.layers.multi_head import split_heads

KINDS = ("dense", "random", "factorised_dense", "factorised_random", "dot_product")


def dense_scores(x: Tensor, W_1: Tensor, b_1: Tensor, W_2: Tensor, b_2: Tensor) -> Tensor:
    """Return dense scores (B, H, N, N_k): x (B, N, D), W_1 (H, D_h, D), b_1 (H, D_h), W_2 (H, N_k, D_h), b_2 (H, N_k)."""
    hidden = torch.relu(x.unsqueeze(1) @ W_1.mT + b_1.unsqueeze(-2))  # (B, H, N, D_h)
    return hidden @ W_2.mT + b_2.unsqueeze(-2)


def factorised_dense_scores(x: Tensor, W_A: Tensor, W_B: Tensor) -> Tensor:
    """Return factorised dense scores (B, H, N, a b): x (B, N, D), W_A (H, a, D), W_B (H, b, D). Column l is (W_A x)[l // b] times (W_B x)[l
    mod b].
    """
    block, place = x.unsqueeze(1) @ W_A.mT, x.unsqueeze(1) @ W_B.mT  # (B, H, N, a), (B, H, N, b)
    return (block.unsqueeze(-1) * place.unsqueeze(-2)).flatten(-2)


def factorised_random_scores(R_1: Tensor, R_2: Tensor) -> Tensor:
    """Return R_1 R_2ᵀ (.., N, N_k), whose rank is at most k: R_1 (.., N, k), R_2 (.., N_k, k)."""
    return R_1 @ R_2.mT


def mixed_scores(scores: Sequence[Tensor], alpha: Tensor) -> Tensor:
    """Return the mixture sum_c softmax(α)_c L_c: C scores (B or 1, H, N, N_k), α (C,) -> (B or 1, H, N, N_k)."""
    shares = (share * L for share, L in zip(alpha.softmax(0).unbind(), scores, strict=True))
    return reduce(torch.add, shares)


class SynthesizedScores(nn.Module):
    """The scores of one kind, or a mixture of several with initially equal weights (α = 0)."""

    def __init__(self, kinds: dict[str, nn.Module]) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict(kinds)
        self.alpha = nn.Parameter(torch.zeros(len(kinds))) if len(kinds) > 1 else None

    def keys(self, x: Tensor) -> Tensor | None:
        """Return the keys for the dot product, (B, N, D) -> (B, H, N, D_k), or None if the dot product is not among the kinds."""
        if "dot_product" not in self.kinds:
            return None
        dot_product: Any = self.kinds["dot_product"]
        return dot_product.keys(x)

    def forward(self, x: Tensor, t: Tensor, k: Tensor | None, n_keys: int) -> Tensor:
        """Return the scores: x (B, N, D), t (B or 1, N), k the `keys` of all N_k tokens -> (B or 1, H, N, N_k)."""
        scores = [made(x, k) if isinstance(made, DotProductScores) else made(x, t, n_keys) for made in self.kinds.values()]
        return scores[0] if self.alpha is None else mixed_scores(scores, self.alpha)


class DenseScores(nn.Module):
    """A module that computes `dense_scores` with its own weights."""

    def __init__(self, d_model: int, n_heads: int, n_positions: int, d_hidden: int) -> None:
        super().__init__()
        self.W_1 = nn.Parameter(torch.randn(n_heads, d_hidden, d_model) * d_model**-0.5)
        self.b_1 = nn.Parameter(torch.zeros(n_heads, d_hidden))
        self.W_2 = nn.Parameter(torch.randn(n_heads, n_positions, d_hidden) * (2 / d_hidden) ** 0.5)  # 2: the relu halves the variance
        self.b_2 = nn.Parameter(torch.zeros(n_heads, n_positions))

    def forward(self, x: Tensor, t: Tensor, n_keys: int) -> Tensor:
        return dense_scores(x, self.W_1, self.b_1, self.W_2[:, :n_keys], self.b_2[:, :n_keys])


class RandomScores(nn.Module):
    """A module that holds the scores R, trained or fixed."""

    R: Tensor

    def __init__(self, n_heads: int, n_positions: int, fixed: bool, random: torch.Generator) -> None:
        super().__init__()
        _keep(self, "R", torch.randn(n_heads, n_positions, n_positions, generator=random if fixed else None), fixed)

    def forward(self, x: Tensor, t: Tensor, n_keys: int) -> Tensor:
        return self.R[:, :, :n_keys][:, t].transpose(0, 1)


class FactorisedDenseScores(nn.Module):
    """A module that computes `factorised_dense_scores`. a: rows of W_A; None: the largest divisor of n_positions up to its square root."""

    def __init__(self, d_model: int, n_heads: int, n_positions: int, a: int | None) -> None:
        super().__init__()
        a = a or max(a for a in range(1, math.isqrt(n_positions) + 1) if n_positions % a == 0)
        if a < 1 or n_positions % a:
            raise ValueError(f"a={a} does not divide n_positions={n_positions}, which are a blocks of equal length; choose a divisor")
        self.W_A = nn.Parameter(torch.randn(n_heads, a, d_model) * d_model**-0.5)
        self.W_B = nn.Parameter(torch.randn(n_heads, n_positions // a, d_model) * d_model**-0.5)

    def forward(self, x: Tensor, t: Tensor, n_keys: int) -> Tensor:
        return factorised_dense_scores(x, self.W_A, self.W_B)[..., :n_keys]


class FactorisedRandomScores(nn.Module):
    """A module that computes `factorised_random_scores` of its own R_1 and R_2, trained or fixed."""

    R_1: Tensor
    R_2: Tensor

    def __init__(self, n_heads: int, n_positions: int, rank: int, fixed: bool, random: torch.Generator) -> None:
        super().__init__()
        for name in ("R_1", "R_2"):
            R = torch.randn(n_heads, n_positions, rank, generator=random if fixed else None)
            _keep(self, name, R * rank**-0.25, fixed)

    def forward(self, x: Tensor, t: Tensor, n_keys: int) -> Tensor:
        return factorised_random_scores(self.R_1[:, t].transpose(0, 1), self.R_2[:, :n_keys])


class DotProductScores(nn.Module):
    """A module that computes the scores of scaled dot-product attention, with its own projections to q and k."""

    def __init__(self, d_model: int, n_heads: int, d_head: int, bias: bool) -> None:
        super().__init__()
        self.n_heads, self.scale = n_heads, d_head**-0.5
        self.to_q = nn.Linear(d_model, n_heads * d_head, bias=bias)
        self.to_k = nn.Linear(d_model, n_heads * d_head, bias=bias)

    def keys(self, x: Tensor) -> Tensor:
        return split_heads(self.to_k(x), self.n_heads)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return (split_heads(self.to_q(x), self.n_heads) * self.scale).to(k.dtype) @ k.mT


def _keep(module: nn.Module, name: str, R: Tensor, fixed: bool) -> None:
    """Store the matrix R in the module: as a buffer in the state dict if `fixed`, otherwise as a parameter."""
    if fixed:
        module.register_buffer(name, R)
    else:
        setattr(module, name, nn.Parameter(R))
