"""Attention as fusion: P descriptions of one thing (text, picture, sound ..) become one, by a query that is learned.

alpha_p = cᵀ relu(W h_p + b),   beta = softmax over the modalities p that are there,   h = sum_p beta_p h_p
The word attention of Yang et al. 2016, "Hierarchical attention networks", eqs. 5-7, with relu for tanh. O(P D A). With c = 0 it is the
mean, and where relu is 0 for every h_p nothing is learned: c begins away from 0, and b at 0.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.scaled_dot_product import masked_softmax


def fusion_weights(h: Tensor, *, W: Tensor, b: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
    """beta: (B, P, D), (A, D), (A,), (A,), bool (B, P), True = there -> (B, P); all 0 where nothing is there."""
    alpha = torch.relu(h @ W.mT + b) @ c  # (B, P)
    return torch.softmax(alpha, dim=-1) if mask is None else masked_softmax(alpha, mask)


def fuse(h: Tensor, *, W: Tensor, b: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, P, D) -> (B, D), other arguments as in `fusion_weights`; 0 where nothing is there. What stands for a missing one is finite."""
    return (fusion_weights(h, W=W, b=b, c=c, mask=mask).unsqueeze(-2) @ h).squeeze(-2)


class ModalityFusion(nn.Module):
    """Fuses vectors of D numbers by a hidden layer of A units. Modalities have no order; their encoders stand outside."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(d_hidden, d_model))
        self.b = nn.Parameter(torch.zeros(d_hidden))
        self.c = nn.Parameter(torch.empty(d_hidden))
        nn.init.xavier_uniform_(self.W)
        bound = (6 / (d_hidden + 1)) ** 0.5  # Xavier's, of a map from A numbers to one
        nn.init.uniform_(self.c, -bound, bound)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, P, D), bool (B, P), True = there -> (B, D)."""
        return fuse(h, W=self.W, b=self.b, c=self.c, mask=mask)
