"""A convolution, and the attention that is one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.attention.layers.softmax import SoftmaxAttention
from models.attention.scoring.convolution_as_attention import ConvolutionAsAttention, quadratic_scores
from tests.cases import in_one_test
from tests.models.attention.scores import drawn

EXACT = 1e-9  # float64: off-pixel weights of e^-46
ROUNDED = 1e-6  # float32, relative to the largest output where that is above 1


CONVOLUTIONS = {
    "3 x 3": (nn.Conv2d(2, 5, 3), (7, 9)),
    "3 x 3, zeros around": (nn.Conv2d(2, 5, 3, padding=1), (7, 9)),
    "fewer channels": (nn.Conv2d(4, 1, 3, padding=1), (5, 5)),
    "5 x 5, no bias": (nn.Conv2d(1, 2, 5, padding=2, bias=False), (6, 5)),
    "2 x 3, even and not square": (nn.Conv2d(2, 2, (2, 3), padding=(1, 0)), (5, 6)),
    "strides and dilation": (nn.Conv2d(2, 3, 3, stride=(2, 1), padding=2, dilation=(1, 2)), (8, 7)),
    "1 x 1": (nn.Conv2d(3, 4, 1), (3, 4)),
    "kernel as large as the picture": (nn.Conv2d(2, 3, 4), (4, 4)),
    "1-D": (nn.Conv1d(3, 4, 5, padding=2), (11,)),
    "1-D, dilated": (nn.Conv1d(3, 4, 2, padding=3, dilation=3), (11,)),
    "3-D": (nn.Conv3d(1, 2, 2), (3, 4, 3)),
}
every_convolution = in_one_test(("convolution", "sizes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@every_convolution
@torch.no_grad()
def test_it_computes_what_the_convolution_computes(convolution: nn.Conv2d, sizes: tuple[int, ...]) -> None:
    convolution = convolution.double()
    x = drawn(2, convolution.in_channels, *sizes)
    expected = convolution(x)
    y = ConvolutionAsAttention(convolution)(x)
    assert y.shape == expected.shape
    assert (y - expected).abs().max() <= EXACT


@every_convolution
@torch.no_grad()
def test_eighteen_is_enough_in_float32(convolution: nn.Conv2d, sizes: tuple[int, ...]) -> None:
    convolution = convolution.float()
    x = drawn(2, convolution.in_channels, *sizes).float()
    expected = convolution(x)
    error = (ConvolutionAsAttention(convolution, alpha=18.0)(x) - expected).abs().max()
    assert error <= ROUNDED * expected.abs().max().clamp_min(1)


@torch.no_grad()
def test_it_is_multi_head_attention_with_a_bias_on_positions_alone() -> None:
    """The layer of LAYERS, its q and k 0, given the quadratic scores as `pair_bias`; compared on the interior."""
    C, n = 4, 6
    convolution = nn.Conv2d(C, C, 3).double()
    attention = ConvolutionAsAttention(convolution)
    layer = SoftmaxAttention(C, 9, d_head=C).double()
    for linear in (layer.to_q, layer.to_k, layer.to_v, layer.to_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    layer.to_v.weight.copy_(attention.W_v.flatten(0, 1))
    layer.to_out.weight.copy_(attention.W_o.permute(1, 0, 2).flatten(1))
    layer.to_out.bias.copy_(convolution.bias)
    places = torch.cartesian_prod(torch.arange(n), torch.arange(n)).double()
    bias = quadratic_scores(places - places.unsqueeze(1), attention.position_weights).unsqueeze(0)
    x = drawn(2, C, n, n)
    y = layer(x.flatten(2).mT, pair_bias=bias).mT.unflatten(2, (n, n))
    assert (y[..., 1:-1, 1:-1] - convolution(x)).abs().max() <= EXACT


def test_its_weights_can_be_trained_on() -> None:
    """Where the softmax is not yet one pixel, gradients reach where a head looks."""
    attention = ConvolutionAsAttention(nn.Conv2d(2, 3, 3, padding=1).double(), alpha=0.5)
    x, target = drawn(2, 2, 4, 4), drawn(2, 3, 4, 4, seed=1)
    F.mse_loss(attention(x), target).backward()
    assert all(parameter.grad.abs().max() > 1e-4 for parameter in attention.parameters())
    assert torch.autograd.gradcheck(attention, (drawn(1, 2, 3, 3).requires_grad_(),), fast_mode=True)


@in_one_test(
    "convolution",
    [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(1, 1, 3, padding="same"), nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
     nn.ConvTranspose2d(1, 1, 3)],
)  # fmt: skip
def test_what_is_not_a_plain_convolution_is_refused(convolution: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"must have groups=1, padding in numbers and padding_mode='zeros'"):
        ConvolutionAsAttention(convolution)
