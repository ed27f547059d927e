"""How many dimensions a matrix of attention weights has: counted, and weighted by how large they are.

φ(Q) φ(K)ᵀ is a product through D_φ numbers, so its rank is at most D_φ (D_k for elu + 1) however long the text; softmax(Q Kᵀ) generally has
the full rank N. A causal mask gives both of them full rank, since what is left is a triangle with a positive diagonal.
"""

import torch
from torch import Tensor


def numerical_rank(matrix: Tensor, *, rtol: float = 1e-9) -> Tensor:
    """How many singular values are above rtol times the largest: (.., N, N_k) -> (..) int64. Taken in float64.

    Nine digits are asked for, of the sixteen of float64; give 1e-5 for a matrix that was computed in float32, whose rounding has full rank.
    """
    return torch.linalg.matrix_rank(matrix.double(), rtol=rtol)


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the singular values, divided by their sum: (.., N, N_k) -> (..) float64, 1 to N, and 0 for a matrix of zeros.

    N for N equal singular values, near 1 where one is far above all others. Roy & Vetterli 2007, The effective rank, EUSIPCO.
    """
    s = torch.linalg.svdvals(matrix.double())
    total = s.sum(-1, keepdim=True)
    shares = s / (total + (total == 0))
    entropy = -torch.xlogy(shares, shares).sum(-1)
    return entropy.exp() * (total.squeeze(-1) > 0)
