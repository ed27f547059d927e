"""Short causal convolution: each channel mixes its own last K inputs, and the state is the K - 1 that the next call still needs.

y_tc = silu(sum_{j < K} w_cj x_{t-K+1+j, c})
In front of the recurrence of gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), it lets a key tell which token came before.
O(N K D_c) time, D_c (K - 1) numbers of state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolve(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """(B, D_c, N), (D_c, 1, K), the K - 1 inputs before x (B, D_c, K - 1) -> (B, D_c, N), before the SiLU."""
    return F.conv1d(torch.cat([past, x], dim=-1), weight, groups=weight.shape[0])


def last_inputs(x: Tensor, past: Tensor, lengths: Tensor) -> Tensor:
    """The K - 1 inputs that end with token `lengths` (B,) of each row of x (B, D_c, N), the oldest from past, (B, D_c, K - 1) like them.

    They are picked and not computed: a row of length 0 gets its `past` back, bit for bit.
    """
    window = torch.cat([past, x], dim=-1)  # (B, D_c, K - 1 + N)
    columns = lengths[:, None] + torch.arange(past.shape[-1], device=x.device)  # (B, K - 1)
    return window.gather(-1, columns[:, None, :].expand(-1, x.shape[1], -1))


class ShortConvolution(nn.Module):
    """The convolution of D_c channels, SiLU included. Its state (B, D_c, K - 1) is in float32, or float64 where x is."""

    convolve = staticmethod(convolve)  # an attribute, so that the export can put an operator of the runtime in its place

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        if kernel < 2:
            raise ValueError(f"kernel={kernel} must be at least 2; with 1 there is no past to mix in")
        # Drawn as nn.Conv1d draws it, but not an nn.Conv1d, whose padding would stand on both sides.
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    @property
    def state_shape(self) -> tuple[int, int]:
        """(D_c, K - 1), of one sequence."""
        return (self.weight.shape[0], self.weight.shape[2] - 1)

    def forward(self, x: Tensor, mask: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N, D_c), bool (B, N) with the tokens of a row at its left, (B, D_c, K - 1) -> (B, N, D_c), the new past."""
        x_BDN = x.transpose(1, 2).to(past.dtype)
        lengths = x.new_full(x.shape[:1], x.shape[1], dtype=torch.int64) if mask is None else mask.sum(1)
        y = F.silu(self.convolve(x_BDN, self.weight.to(past.dtype), past)).transpose(1, 2)
        return y.to(x.dtype), last_inputs(x_BDN, past, lengths)
