"""Attention by a score as loops, one pair of tokens at a time, for the tests of the scores."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1e-10  # float64: the same formula, summed in another order

B, H, N_Q, N_K, D_K, D_V = 2, 3, 5, 7, 4, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(n_q: int = N_Q, n_k: int = N_K) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(B, H, n_q, D_K, seed=1), drawn(B, H, n_k, D_K, seed=2), drawn(B, H, n_k, D_V, seed=3)


def pairs(n_q: int = N_Q, n_k: int = N_K) -> tuple[Tensor, Tensor]:
    """A mask (B, 1, N_q, N_k) whose first query sees no key and whose second sees one, and a bias (1, H, N_q, N_k)."""
    mask = drawn(B, 1, n_q, n_k, seed=4) > -0.5
    mask[:, :, 0] = False
    mask[:, :, 1:2] = torch.arange(n_k) == n_k - 1
    return mask, drawn(1, H, n_q, n_k, seed=5)


def by_loops(
    score: Callable[[int, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor, *, beside: float = 0.0
) -> Tensor:
    """score(h, q_i, k_j) of head h. beside: what the denominator holds beside the exponentials."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if mask[b, 0, i, j]]
                exps = [math.exp(score(h, q[b, h, i], k[b, h, j]) + bias[0, h, i, j]) for j in seen]
                for j, e in zip(seen, exps, strict=True):
                    o[b, h, i] += e / (beside + sum(exps)) * v[b, h, j]
    return o
