"""Modality fusion: P vectors of one object (from its text, its picture, its sound, ..) are combined by attention with a learned query c.

alpha_p = cᵀ relu(W h_p + b),   beta = softmax over the modalities p that are present,   h = sum_p beta_p h_p
The word attention of Yang et al. 2016, "Hierarchical attention networks", eqs. 5-7, with relu instead of tanh. O(P D A) time for A
hidden units. With c = 0 all weights are equal, and W gets no gradient. W gets none either if every relu is 0. So c is drawn at random
initially, and b is 0.
"""

import torch
from torch import Tensor, nn

from models.attention.layers.scaled_dot_product import masked_softmax


def fusion_weights(h: Tensor, *, W: Tensor, b: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return beta (B, P): h (B, P, D), W (A, D), b and c (A,), mask bool (B, P), True = present. All 0 if no modality is present."""
    alpha = torch.relu(h @ W.mT + b) @ c  # (B, P)
    return masked_softmax(alpha, mask)


def fuse(h: Tensor, *, W: Tensor, b: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the weighted sum h (B, D), or 0 if no modality is present. The arguments are those of `fusion_weights`.

    The vectors of absent modalities get the weight 0, but must be finite.
    """
    return (fusion_weights(h, W=W, b=b, c=c, mask=mask).unsqueeze(-2) @ h).squeeze(-2)


class ModalityFusion(nn.Module):
    """A layer that fuses P vectors of width D, with A hidden units, whatever their order. The encoders of the modalities are not in it."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(d_hidden, d_model))
        self.b = nn.Parameter(torch.zeros(d_hidden))
        self.c = nn.Parameter(torch.empty(d_hidden))
        nn.init.xavier_uniform_(self.W)
        bound = (6 / (d_hidden + 1)) ** 0.5  # Xavier uniform for a map of d_hidden inputs to 1 output
        nn.init.uniform_(self.c, -bound, bound)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Fuse h (B, P, D) into (B, D). mask bool (B, P): True = present."""
        return fuse(h, W=self.W, b=self.b, c=self.c, mask=mask)
