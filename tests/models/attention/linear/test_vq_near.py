"""Transformer-VQ with a position bias against a softmax over all pairs of rounded keys."""

import pytest
import torch
from torch import Tensor

from models.attention.layers.scaled_dot_product import attend
from models.attention.linear.vq_near import attend_causal_to_codes_and_near
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, ROUNDED, heads, some_keys

C, Z, D = 3, 5, 4


def drawn(N: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, codes, v, the codebook and b."""
    q, v = heads(N, n=2, D=D, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, Z, (2, 2, N), generator=generator)
    codebook, bias = (2 * torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((Z, D), (2 * C,)))
    return q, codes, v, codebook, bias


def by_pairs(q: Tensor, codes: Tensor, v: Tensor, codebook: Tensor, bias: Tensor, *, scale: float, mask: Tensor | None) -> Tensor:
    N = q.shape[2]
    t = torch.arange(N)
    gaps = t[:, None] - t
    is_near = (t[:, None] // C - t // C <= 1) & (gaps >= 0)
    b = torch.where(is_near, bias[:, gaps.clamp(0, 2 * C - 1)], 0.0)  # (H, N, N)
    k_hat = codebook[torch.arange(2)[:, None], codes]
    seen = (gaps >= 0) if mask is None else (gaps >= 0) & mask[:, None, None, :]
    return attend(q, k_hat, v, scale=scale, mask=seen, bias=b)


@in_one_test("N", LENGTHS)
def test_is_softmax_over_rounded_keys(N: int) -> None:
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
        given = drawn(N, dtype)
        for mask in (None, some_keys(N)):
            o = attend_causal_to_codes_and_near(*given, scale=0.3, mask=mask)
            assert o.dtype == dtype
            assert (o - by_pairs(*given, scale=0.3, mask=mask)).abs().max() <= tolerance


def test_large_scores_stay_finite() -> None:
    q, codes, v, codebook, bias = drawn(17, torch.float32)
    assert torch.isfinite(attend_causal_to_codes_and_near(1e3 * q, codes, v, 1e3 * codebook, 1e3 * bias)).all()


def test_distances_of_no_two_blocks_are_refused() -> None:
    q, codes, v, codebook, bias = drawn(4)
    with pytest.raises(ValueError, match="bias has 5 distances, an odd number; give as many as two blocks have"):
        attend_causal_to_codes_and_near(q, codes, v, codebook, bias[:, :5])
