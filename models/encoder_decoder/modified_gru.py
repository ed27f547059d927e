"""The recurrent cell of a decoder with attention: a GRU whose inputs are the previous output y and the context c. It applies the
reset gate r to the state before the product with W_ss.

r = σ(W_yr y + W_sr s + W_cr c + b_r)        s̃ = tanh(W_ys y + W_ss (s ⊙ r) + W_cs c + b_s)
z = σ(W_yz y + W_sz s + W_cz c + b_z)        s' = z ⊙ s + (1 - z) ⊙ s̃
Bahdanau et al. 2014, arXiv:1409.0473, appendix A.2.2, where z and 1 - z are exchanged. `torch.nn.GRUCell` differs: it applies the
reset gate after the product with W_ss. ONNX's GRU with linear_before_reset=0 computes this cell, if its input is [y; c] and its gates
are in the order z, r, s̃.
"""

import torch
from torch import Tensor, nn


def advance(given: Tensor, s: Tensor, *, W_sr: Tensor, W_sz: Tensor, W_ss: Tensor) -> Tensor:
    """Compute the next state s' (B, D_s) from `given` (B, 3 D_s) and the state s (B, D_s).

    `given` is W_y y + W_c c + b for r, z and s̃, concatenated in this order. W_sr, W_sz and W_ss are (D_s, D_s), stored as [out, in].
    """
    given_r, given_z, given_s = given.chunk(3, dim=-1)
    r = torch.sigmoid(given_r + s @ W_sr.mT)
    z = torch.sigmoid(given_z + s @ W_sz.mT)
    candidate = torch.tanh(given_s + (s * r) @ W_ss.mT)
    return z * s + (1 - z) * candidate


class ModifiedGru(nn.Module):
    """A cell that computes `advance` with its own weights. `from_y`, which has the biases, and `from_c` have the rows of r, then those of
    z, then those of s̃.
    """

    def __init__(self, d_output: int, d_context: int, d_state: int) -> None:
        super().__init__()
        self.from_y = nn.Linear(d_output, 3 * d_state)
        self.from_c = nn.Linear(d_context, 3 * d_state, bias=False)
        self.W_sr, self.W_sz, self.W_ss = (nn.Parameter(torch.empty(d_state, d_state)) for _ in range(3))
        nn.init.zeros_(self.from_y.bias)
        for W in (self.W_sr, self.W_sz, self.W_ss):
            nn.init.orthogonal_(W)

    def forward(self, given_y: Tensor, c: Tensor, s: Tensor) -> Tensor:
        """Compute the next state (B, D_s) from given_y (B, 3 D_s), the context c (B, D_c) and the state s (B, D_s). given_y is `from_y(y)`,
        which training computes for all outputs at once.
        """
        return advance(given_y + self.from_c(c), s, W_sr=self.W_sr, W_sz=self.W_sz, W_ss=self.W_ss)
