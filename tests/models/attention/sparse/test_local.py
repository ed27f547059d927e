"""Local attention against a dense mask, and its limits."""

import torch

from models.attention.sparse.local import attend_local
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, check, dense, heads


@in_one_test("causal", [False, True])
@in_one_test(("window", "block"), [(0, 8), (1, 8), (7, 8), (8, 8), (9, 8), (3, 1), (20, 8)])
@in_one_test("N", LENGTHS)
def test_is_a_dense_mask_of_a_band(N: int, window: int, block: int, causal: bool) -> None:
    def fast(q, k, v, key_mask):
        return attend_local(q, k, v, window=window, block=block, causal=causal, key_mask=key_mask)

    check(fast, lambda i, j: 0 <= i - j <= window if causal else abs(i - j) <= window, N)


@in_one_test(("N_q", "N_k"), [(5, 20), (20, 5), (9, 8), (1, 3)])
def test_other_numbers_of_queries_and_keys_make_a_band(N_q: int, N_k: int) -> None:
    q, (k, v) = heads(N_q)[0], heads(N_k, n=2, seed=1)
    gaps = torch.arange(N_q)[:, None] - torch.arange(N_k)
    assert (attend_local(q, k, v, window=3, block=4) - dense(q, k, v, gaps.abs() <= 3)).abs().max() <= EXACT
