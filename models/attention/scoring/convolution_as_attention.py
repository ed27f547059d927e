"""Any convolution as multi-head self-attention: one head for each pixel of the kernel, which attends to that pixel only.

score_h(δ) = v_h . r_δ = -α (|δ|² - 2 Δ_h . δ) = -α |δ - Δ_h|² + const,   δ = key position - query position,   Δ_h = pixel of head h
r_δ = (|δ|², δ_1, δ_2, ..),   v_h = -α (1, -2 Δ_h1, -2 Δ_h2, ..)          the quadratic encoding; δ has an entry for each axis
y_i = sum_h softmax_j(score_h(j - i)) x_j W_h^V W_h^O + b,   W_h^V = I,   W_h^O = the slice of the kernel at Δ_h
Cordonnier et al. 2020, arXiv:1911.03584, theorem 1, eq. 9: H = K² heads compute any K x K kernel; scores depend on positions only. For
large α the softmax selects one pixel: the weight of any other is at most e^-α, so α = 46 suffices in float64, and 18 in float32.
O(N² C_in) time a head.
"""

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA = 46.0


def quadratic_scores(offsets: Tensor, position_weights: Tensor) -> Tensor:
    """Return the scores v_h . r_δ, r_δ = (|δ|², δ_1, δ_2, ..): offsets δ (N_q, N_k, axes), weights v (H, 1 + axes) -> (H, N_q, N_k)."""
    r = torch.cat([offsets.square().sum(-1, keepdim=True), offsets], dim=-1)  # (N_q, N_k, 1 + axes)
    return torch.einsum("qka,ha->hqk", r, position_weights)


def position_weights(shifts: Tensor, alpha: float = ALPHA) -> Tensor:
    """Return v_h = -α (1, -2 Δ_h), with which head h attends to the offset Δ_h: shifts Δ (H, axes) -> (H, 1 + axes)."""
    return -alpha * torch.cat([torch.ones_like(shifts[:, :1]), -2 * shifts], dim=-1)


def attend_to_places(x: Tensor, offsets: Tensor, position_weights: Tensor, W_v: Tensor, W_o: Tensor) -> Tensor:
    """Compute the outputs of attention by position (B, N_q, C_out), without a bias.

    x (B, N_k, C_in), offsets δ (N_q, N_k, axes), position_weights v_h (H, 1 + axes), W_v (H, D_v, C_in), W_o (H, C_out, D_v).
    """
    weights = quadratic_scores(offsets, position_weights).softmax(-1)  # (H, N_q, N_k)
    heads = weights @ (x.unsqueeze(1) @ W_v.mT)  # (B, H, N_q, D_v)
    return torch.einsum("bhqd,hod->bqo", heads, W_o)


class ConvolutionAsAttention(nn.Module):
    """An attention layer that computes the same as a given convolution, zero padding included. Its weights are trainable.

    Raises ValueError for a transposed or grouped convolution and for other than zero padding: the theorem does not cover them.
    """

    def __init__(self, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, *, alpha: float = ALPHA) -> None:
        super().__init__()
        c = convolution
        if c.transposed or c.groups != 1 or isinstance(c.padding, str) or c.padding_mode != "zeros":
            raise ValueError(f"{c} must have groups=1, padding in numbers and padding_mode='zeros', and not be transposed")
        self.padding, self.stride, self.dilation, self.kernel_size = c.padding, c.stride, c.dilation, c.kernel_size
        weight = c.weight.detach()  # (C_out, C_in, K, ..)
        shifts = _grid([range(0, K * step, step) for K, step in zip(c.kernel_size, c.dilation, strict=True)]).to(weight)  # (H, axes)
        self.position_weights = nn.Parameter(position_weights(shifts - self._centre(shifts), alpha))
        self.W_v = nn.Parameter(torch.eye(c.in_channels).to(weight).repeat(len(shifts), 1, 1))  # (H, C_in, C_in)
        self.W_o = nn.Parameter(weight.flatten(2).permute(2, 0, 1).clone())  # (H, C_out, C_in)
        self.bias = None if c.bias is None else nn.Parameter(c.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, C_in, *sizes) to (B, C_out, *output sizes of the convolution)."""
        x = F.pad(x, [n for n in reversed(self.padding) for _ in range(2)])
        keys = _grid([range(n) for n in x.shape[2:]]).to(x)  # (N_k, axes)
        reach = [step * (K - 1) for K, step in zip(self.kernel_size, self.dilation, strict=True)]
        corners = [range(0, n - r, stride) for n, r, stride in zip(x.shape[2:], reach, self.stride, strict=True)]
        queries = _grid(corners).to(x)  # (N_q, axes): position of the kernel's first pixel for each output
        queries = queries + self._centre(queries)
        y = attend_to_places(x.flatten(2).mT, keys - queries.unsqueeze(1), self.position_weights, self.W_v, self.W_o)
        y = y if self.bias is None else y + self.bias
        return y.mT.unflatten(2, [len(corner) for corner in corners])

    def _centre(self, like: Tensor) -> Tensor:
        """Return the offset of the kernel's middle pixel from its first one, (axes,)."""
        return torch.tensor([step * (K // 2) for K, step in zip(self.kernel_size, self.dilation, strict=True)]).to(like)


def _grid(axes: Sequence[range]) -> Tensor:
    """Return the coordinates (positions, axes) of all positions of a grid. The coordinate of the last axis changes fastest."""
    return torch.tensor(list(product(*axes)))
