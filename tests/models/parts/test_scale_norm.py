"""ScaleNorm against its formula, and against RMSNorm, which has a weight for every column."""

import torch

from models.parts.scale_norm import ScaleNorm

EXACT = 1e-10  # float64


def test_it_is_a_length_that_is_learned() -> None:
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = ScaleNorm(5, eps=0.0).double()
    torch.nn.init.constant_(norm.g, 0.7)
    assert (norm(x) - 0.7 * 5**0.5 * x / x.norm(dim=-1, keepdim=True)).abs().max() <= EXACT
    rms = torch.nn.RMSNorm(5, eps=0.0).double()
    torch.nn.init.constant_(rms.weight, 0.7)
    assert torch.equal(norm(x), rms(x))
    assert sum(parameter.numel() for parameter in norm.parameters()) == 1


def test_a_vector_of_zeros_stays_one() -> None:
    assert not ScaleNorm(4)(torch.zeros(1, 4)).any()
