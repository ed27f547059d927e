"""Any convolution as multi-head self-attention: a head for each pixel of the kernel, which looks at that pixel and at no other.

score_h(δ) = v_h . r_δ = -α (|δ|² - 2 Δ_h . δ) = -α |δ - Δ_h|² + const,   δ = key's place - query's place,
r_δ = (|δ|², δ_1, δ_2, ..),   v_h = -α (1, -2 Δ_h1, -2 Δ_h2, ..)          the quadratic encoding, with a δ for each axis
y_i = sum_h softmax_j(score_h(j - i)) x_j W_h^V W_h^O + b,   W_h^V = I,   W_h^O = the slice of the kernel at Δ_h
Cordonnier et al. 2020, arXiv:1911.03584, theorem 1 and eq. 9: H = K² heads compute any K x K kernel, and scores know no content. As α
grows, the softmax becomes one pixel: its neighbours weigh e^-α each, and α = 46 is enough in float64, 18 in float32. O(N² C_in) a head.
"""

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA = 46.0


def quadratic_scores(offsets: Tensor, position_weights: Tensor) -> Tensor:
    """r_δ . v_h: δ (N_q, N_k, axes), v (H, 1 + axes) -> (H, N_q, N_k)."""
    r = torch.cat([offsets.square().sum(-1, keepdim=True), offsets], dim=-1)  # (N_q, N_k, 1 + axes)
    return torch.einsum("qka,ha->hqk", r, position_weights)


def position_weights(shifts: Tensor, alpha: float = ALPHA) -> Tensor:
    """v_h of heads that look Δ_h away: (H, axes) -> (H, 1 + axes)."""
    return -alpha * torch.cat([torch.ones_like(shifts[:, :1]), -2 * shifts], dim=-1)


def attend_to_places(x: Tensor, offsets: Tensor, position_weights: Tensor, W_v: Tensor, W_o: Tensor) -> Tensor:
    """(B, N_k, C_in), (N_q, N_k, axes), (H, 1 + axes), (H, D_v, C_in), (H, C_out, D_v) -> (B, N_q, C_out)."""
    weights = quadratic_scores(offsets, position_weights).softmax(-1)  # (H, N_q, N_k)
    heads = weights @ (x.unsqueeze(1) @ W_v.mT)  # (B, H, N_q, D_v)
    return torch.einsum("bhqd,hod->bqo", heads, W_o)


class ConvolutionAsAttention(nn.Module):
    """The attention that computes what a convolution computes, zeros around the picture included. Its weights can be trained on.

    Raises ValueError for groups, transposed convolutions and padding other than a number of zeros, which are not what the theorem is about.
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
        """(B, C_in, *sizes) -> (B, C_out, *sizes of the convolution's output)."""
        x = F.pad(x, [n for n in reversed(self.padding) for _ in range(2)])
        keys = _grid([range(n) for n in x.shape[2:]]).to(x)  # (N_k, axes)
        reach = [step * (K - 1) for K, step in zip(self.kernel_size, self.dilation, strict=True)]
        corners = [range(0, n - r, stride) for n, r, stride in zip(x.shape[2:], reach, self.stride, strict=True)]
        queries = _grid(corners).to(x)  # (N_q, axes): where a kernel's first pixel lies
        queries = queries + self._centre(queries)
        y = attend_to_places(x.flatten(2).mT, keys - queries.unsqueeze(1), self.position_weights, self.W_v, self.W_o)
        y = y if self.bias is None else y + self.bias
        return y.mT.unflatten(2, [len(corner) for corner in corners])

    def _centre(self, like: Tensor) -> Tensor:
        """(axes,): the place of the kernel's middle pixel, seen from its first one."""
        return torch.tensor([step * (K // 2) for K, step in zip(self.kernel_size, self.dilation, strict=True)]).to(like)


def _grid(axes: Sequence[range]) -> Tensor:
    """Every place, the last axis fastest: (places, axes)."""
    return torch.tensor(list(product(*axes)))
