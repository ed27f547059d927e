"""The short convolution: the same whole or in pieces, and a state that is its last inputs and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from models.attention.layers.short_convolution import ShortConvolution, last_inputs
from tests.cases import in_one_test
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


@in_one_test("pieces", [(1,) * 9, (2, 7), (5, 1, 3)])
@torch.no_grad()
def test_in_pieces_it_is_the_same(pieces: tuple[int, ...]) -> None:
    """Pieces shorter than the kernel too, whose state has inputs of several pieces."""
    convolution, x = make(), inputs(2, 9)
    whole, end = convolution(x, None, none(2))
    past, outputs = none(2), []
    for piece in x.split(pieces, dim=1):
        y, past = convolution(piece, None, past)
        outputs.append(y)
    assert (torch.cat(outputs, dim=1) - whole).abs().max() <= EXACT
    assert torch.equal(past, end)


@torch.no_grad()
def test_rows_of_unequal_lengths_keep_their_own_last_inputs() -> None:
    convolution, x, past = make(), inputs(4, 6), inputs(4, K - 1)
    _, after = convolution(x, lengths_mask(6, 4, 1, 0), past)
    assert torch.equal(after[0], x[0, 3:6])
    assert torch.equal(after[1], x[1, 1:4])
    assert torch.equal(after[2], torch.cat([past[2, 1:], x[2, :1]]))
    assert torch.equal(after[3], past[3])


def test_inputs_are_picked_in_their_order() -> None:
    past, x = torch.tensor([[[-2.0], [-1.0], [0.0]]]), torch.tensor([[[1.0], [2.0]]])
    for length, expected in enumerate([[-2, -1, 0], [-1, 0, 1], [0, 1, 2]]):
        assert last_inputs(x, past, torch.tensor([length])).flatten().tolist() == expected


def test_a_kernel_without_a_past_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel=1 must be at least 2"):
        ShortConvolution(D_C, 1)
