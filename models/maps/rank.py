"""Computes the effective rank of a matrix of attention weights.

φ(Q) φ(K)ᵀ is a product of matrices with D_φ columns (D_k for elu + 1), so its rank is at most D_φ for any length of the text.
softmax(Q Kᵀ) generally has the full rank N. With a causal mask both have full rank, as they become triangular with a positive
diagonal.
"""

import torch
from torch import Tensor


def effective_rank(matrix: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values, normalised to sum 1: (.., N, N_k) -> (..) float64.

    It is N for N equal singular values, near 1 if one is far above all others, and 0 for a matrix of zeros. Roy & Vetterli 2007,
    The effective rank, EUSIPCO.
    """
    s = torch.linalg.svdvals(matrix.double())
    total = s.sum(-1, keepdim=True)
    shares = s / (total + (total == 0))
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return entropy.exp() * (total.squeeze(-1) > 0)
