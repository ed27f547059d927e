"""Efficient attention, seeing both ways and the past only: as loops, its identities, and exponents that would overflow."""

import torch
from torch import Tensor

from models.attention.linear.causal_efficient import ColumnSums, attend_causal_efficient
from models.attention.linear.efficient import EfficientAttention, attend_efficient
from tests.cases import in_one_test
from tests.models.attention.test_causal_layers import EXACT

B, H, D_K, D_V = 2, 2, 3, 4


def draw(N: int, *widths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, N, width, generator=generator, dtype=torch.float64) for width in widths]


def nothing(dtype: torch.dtype = torch.float64) -> ColumnSums:
    return ColumnSums(*(torch.zeros(B, H, *shape, dtype=dtype) for shape in ((D_K, D_V), (D_K,), (D_K,))))


def by_loops(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Column by column: bool (B, N_q, N_k), which query sees which key."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = seen[b, i].nonzero().flatten()
                for d in range(q.shape[3] if len(keys) else 0):
                    o[b, h, i] += q[b, h, i].softmax(-1)[d] * (k[b, h, keys, d].softmax(-1) @ v[b, h, keys])
    return o


def test_by_loops_with_padding_and_a_row_of_padding() -> None:
    q, k, v = draw(6, D_K, D_K, D_V)
    mask = torch.arange(6) < torch.tensor([4, 0])[:, None]
    expected = by_loops(q, k, v, mask[:, None].expand(B, 6, 6))
    assert (attend_efficient(q, k, v, key_mask=mask) - expected).abs().max() <= EXACT


@in_one_test("N", [1, 7, 8, 9, 70])
def test_causal_by_loops(N: int) -> None:
    q, k, v = draw(N, D_K, D_K, D_V)
    expected = by_loops(q, k, v, torch.ones(B, N, N, dtype=torch.bool).tril())
    assert (attend_causal_efficient(q, k, v, nothing())[0] - expected).abs().max() <= EXACT


@in_one_test("shift", [-1000.0, 1000.0])
def test_a_shift_of_a_column_of_all_keys_changes_nothing(shift: float) -> None:
    """Also where every exponential of the column is 0 or infinite by itself."""
    q, k, v = draw(20, D_K, D_K, D_V)
    shifted = k + torch.tensor([0, shift, 0], dtype=torch.float64)
    assert (attend_efficient(q, shifted, v) - attend_efficient(q, k, v)).abs().max() <= EXACT
    ours, expected = (attend_causal_efficient(q, keys, v, nothing())[0] for keys in (shifted, k))
    assert (ours - expected).abs().max() <= EXACT


def test_keys_that_grow_by_thousands_leave_the_newest() -> None:
    q, k, v = (x.float() for x in draw(20, D_K, D_K, D_V))
    rising = k + 1e4 * torch.arange(20)[:, None]
    o, past = attend_causal_efficient(q, rising, v, nothing(torch.float32))
    assert (o - v).abs().max() <= 1e-5
    assert all(torch.isfinite(tensor).all() for tensor in past)


def test_scaling_is_a_mean_over_the_keys_that_exist() -> None:
    q, k, v = draw(6, D_K, D_K, D_V)
    mask = torch.arange(6) < torch.tensor([4, 0])[:, None]
    o = attend_efficient(q, k, v, key_mask=mask, normalisation="scaling")
    assert (o[0] - q[0] @ k[0, :, :4].mT @ v[0, :, :4] / 4).abs().max() <= EXACT
    assert not o[1].any()
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    layer = EfficientAttention(8, 2, normalisation="scaling")
    assert (layer(x, mask)[0, :4] - layer(x[:1, :4])[0]).abs().max() <= 1e-6


def test_queries_may_be_others_than_the_keys() -> None:
    (q,), (k, v) = draw(5, D_K), draw(9, D_K, D_V)
    assert (attend_efficient(q, k, v) - by_loops(q, k, v, torch.ones(B, 5, 9, dtype=torch.bool))).abs().max() <= EXACT
