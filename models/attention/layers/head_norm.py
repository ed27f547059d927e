"""The norm of a head: it divides by the root mean square of the columns, so that an unnormalised sum over a long past has size 1."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal import at_least_float32


class HeadNorm(nn.RMSNorm):
    """RMS norm over the last axis of (B, H, N, D_v), with D_v weights that all heads share. In float32 at least, even in autocast."""

    def forward(self, x: Tensor) -> Tensor:
        exact = at_least_float32(x.dtype)
        return F.rms_norm(x.to(exact), self.normalized_shape, self.weight.to(exact), self.eps).to(x.dtype)
