"""The short convolution: the same whole or in pieces, and a state that is its last inputs and nothing else."""

import torch
import torch.nn.functional as F

from models.attention.layers.short_convolution import ShortConvolution
from tests.models.attention.test_causal_layers import lengths_mask

D_C, K = 5, 4
EXACT = 1e-12  # float64, sums of four terms


def make() -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(D_C, K).double()


def inputs(B: int, N: int) -> torch.Tensor:
    return torch.randn(B, N, D_C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def none(B: int) -> torch.Tensor:
    return torch.zeros(B, K - 1, D_C, dtype=torch.float64)


@torch.no_grad()
def test_each_channel_mixes_its_own_last_inputs() -> None:
    convolution, x = make(), inputs(1, 6)
    y, _ = convolution(x, None, none(1))
    for t in range(6):
        for c in range(D_C):
            total = sum(float(convolution.weight[c, 0, K - 1 - back] * x[0, t - back, c]) for back in range(min(K, t + 1)))
            assert abs(float(y[0, t, c]) - float(F.silu(torch.tensor(total, dtype=torch.float64)))) <= EXACT


@torch.no_grad()
def test_rows_of_unequal_lengths_keep_their_own_last_inputs() -> None:
    convolution, x, past = make(), inputs(4, 6), inputs(4, K - 1)
    _, after = convolution(x, lengths_mask(6, 4, 1, 0), past)
    assert torch.equal(after[0], x[0, 3:6])
    assert torch.equal(after[1], x[1, 1:4])
    assert torch.equal(after[2], torch.cat([past[2, 1:], x[2, :1]]))
    assert torch.equal(after[3], past[3])
