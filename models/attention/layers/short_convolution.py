"""Short causal convolution: each channel mixes its last K inputs. The state is the last K - 1 inputs, which the next call needs.

y_tc = silu(sum_{j < K} w_cj x_{t-K+1+j, c})
Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) has it before its recurrence, so that a key depends on the preceding tokens too.
For D_c channels it takes O(N K D_c) time, and its state is D_c (K - 1) numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolve(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """Compute the convolution without the SiLU: x (B, N, D_c), weight (D_c, 1, K) -> (B, N, D_c). past (B, K - 1, D_c): inputs before x."""
    return F.conv1d(torch.cat([past, x], dim=1).mT, weight, groups=weight.shape[0]).mT


def last_inputs(x: Tensor, past: Tensor, lengths: Tensor) -> Tensor:
    """Return the last K - 1 inputs of each row, (B, K - 1, D_c), of `past` (B, K - 1, D_c) and the first lengths[b] tokens of x (B, N,
    D_c), as copies: a row of length 0 gets its `past` back bit for bit.
    """
    window = torch.cat([past, x], dim=1)  # (B, K - 1 + N, D_c)
    places = lengths[:, None] + torch.arange(past.shape[1], device=x.device)  # (B, K - 1)
    return window.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))


class ShortConvolution(nn.Module):
    """The convolution of D_c channels, with the SiLU. Its state (B, K - 1, D_c) is float32, or float64 if x is."""

    convolve = staticmethod(convolve)  # an attribute, so that the export can replace it by an operator of the runtime

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        if kernel < 2:
            raise ValueError(f"kernel={kernel} must be at least 2, because a kernel of 1 uses no past token")
        # Initialised like nn.Conv1d. An nn.Conv1d itself would pad on both sides.
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the state of one sequence, (K - 1, D_c)."""
        return (self.weight.shape[2] - 1, self.weight.shape[0])

    def forward(self, x: Tensor, mask: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, N, D_c) and the new past (B, K - 1, D_c) of x (B, N, D_c). mask bool (B, N): True at tokens."""
        exact = x.to(past.dtype)
        lengths = x.new_full(x.shape[:1], x.shape[1], dtype=torch.int64) if mask is None else mask.sum(1)
        y = F.silu(self.convolve(exact, self.weight.to(past.dtype), past))
        return y.to(x.dtype), last_inputs(exact, past, lengths)
