"""The norm of a head: its columns are divided by their root mean square, so that an unnormalised sum over a long past stays of size 1."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal import at_least_float32


class HeadNorm(nn.RMSNorm):
    """Over the last axis of (B, H, N, D_v), with D_v weights that all heads share. In float32 at least, whatever autocast does."""

    def forward(self, x: Tensor) -> Tensor:
        exact = at_least_float32(x.dtype)
        return F.rms_norm(x.to(exact), self.normalized_shape, self.weight.to(exact), self.eps).to(x.dtype)
