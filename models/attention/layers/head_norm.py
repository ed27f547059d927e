"""The norm of a head's output. It divides the output by its root mean square, because a sum over a long past can be large."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.layers.causal import at_least_float32


class HeadNorm(nn.RMSNorm):
    """RMS norm over the last axis of (B, H, N, D_v). All heads share its D_v weights. It computes in float32 at least, even in autocast."""

    def forward(self, x: Tensor) -> Tensor:
        exact = at_least_float32(x.dtype)
        return F.rms_norm(x.to(exact), self.normalized_shape, self.weight.to(exact), self.eps).to(x.dtype)
