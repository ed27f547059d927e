"""The feed-forward layer of a block: two linear layers with an activation between them, applied to each token on its own.

y = W_down act(W_up x);   gated: y = W_down (act(W_gate x) * W_up x)
Vaswani et al. 2017, arXiv:1706.03762, eq. 2; Shazeer 2020, arXiv:2002.05202 (GeGLU, SwiGLU); Kitaev et al. 2020,
arXiv:2001.04451, section 3 (in chunks).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


class FeedForward(nn.Module):
    """A feed-forward layer with hidden width d_feedforward: (.., D) -> (.., D)."""

    def __init__(self, d_model: int, d_feedforward: int, *, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(d_model, d_feedforward, bias=bias)
        self.gate = nn.Linear(d_model, d_feedforward, bias=bias) if gated else None
        self.down = nn.Linear(d_feedforward, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


class ChunkedFeedForward(FeedForward):
    """A `FeedForward` that processes `chunk` tokens at a time, so that chunk * d_feedforward numbers are in memory instead of
    N * d_feedforward.

    In training, each chunk is recomputed for its gradients. An exported graph has no chunks, as the runtime manages its own
    memory. Raises ValueError if `chunk` is less than 1.
    """

    def __init__(self, d_model: int, d_feedforward: int, *, activation: str, gated: bool, bias: bool, chunk: int = 1024) -> None:
        super().__init__(d_model, d_feedforward, activation=activation, gated=gated, bias=bias)
        if chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token")
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer chunk by chunk: (B, N, D) -> (B, N, D)."""
        if torch.compiler.is_exporting():
            return super().forward(x)
        whole = super().forward
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(whole, piece, use_reentrant=False) for piece in x.split(self.chunk, dim=1)], dim=1)
        return torch.cat([whole(piece) for piece in x.split(self.chunk, dim=1)], dim=1)
