"""Local attention against a dense mask, and its limits."""

import pytest
import torch

from models.attention.sparse.local import LocalAttention, attend_local
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, check, check_gradients, dense, heads, mask_of


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "block"), [(0, 8), (1, 8), (7, 8), (8, 8), (9, 8), (3, 1), (20, 8)])
@pytest.mark.parametrize("N", LENGTHS)
def test_is_a_dense_mask_of_a_band(N: int, window: int, block: int, causal: bool) -> None:
    def fast(q, k, v, key_mask):
        return attend_local(q, k, v, window=window, block=block, causal=causal, key_mask=key_mask)

    check(fast, lambda i, j: 0 <= i - j <= window if causal else abs(i - j) <= window, N)


@pytest.mark.parametrize(("N_q", "N_k"), [(5, 20), (20, 5), (9, 8), (1, 3)])
def test_other_numbers_of_queries_and_keys_make_a_band(N_q: int, N_k: int) -> None:
    q, (k, v) = heads(N_q)[0], heads(N_k, n=2, seed=1)
    gaps = torch.arange(N_q)[:, None] - torch.arange(N_k)
    assert (attend_local(q, k, v, window=3, block=4) - dense(q, k, v, gaps.abs() <= 3)).abs().max() <= EXACT


def test_a_window_over_everything_is_full_attention_and_one_of_nothing_the_values() -> None:
    q, k, v = heads(9)
    assert (attend_local(q, k, v, window=8) - dense(q, k, v, mask_of(lambda i, j: True, 9))).abs().max() <= EXACT
    assert (attend_local(q, k, v, window=0) - v).abs().max() <= EXACT


def test_l_layers_see_exactly_l_windows_far() -> None:
    torch.manual_seed(0)
    layers = [LocalAttention(8, 2, window=2, block=4).double() for _ in range(3)]
    x = y = torch.randn(1, 21, 8, dtype=torch.float64).requires_grad_()
    for layer in layers:
        y = layer(y)
    y[0, 10].sum().backward()
    seen = x.grad[0].abs().amax(-1) > 0
    assert seen.nonzero().flatten().tolist() == list(range(10 - 3 * 2, 10 + 3 * 2 + 1))


def test_gradients() -> None:
    check_gradients(lambda q, k, v, key_mask: attend_local(q, k, v, window=1, block=2, key_mask=key_mask))


def test_options_that_make_no_window_are_refused() -> None:
    with pytest.raises(ValueError, match="window=-1 must be at least 0"):
        LocalAttention(8, 2, window=-1)
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        LocalAttention(8, 2, block=0)
