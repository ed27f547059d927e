"""Sparse attention in its three patterns against dense masks, what two layers connect, and the cache of its causal form."""

import torch
from torch import Tensor

from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.sparse.causal_sparse import CausalSparseAttention
from models.attention.sparse.sparse import attend_sparse
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, check, dense, heads, mask_of

MODES = ("union", "strided", "fixed")


def pattern(mode: str, N: int, *, stride: int, c: int, causal: bool) -> Tensor:
    """(2, N, N): of a head of type A and of one of type B."""
    a, b = {
        "union": [lambda i, j: abs(i - j) <= stride or (i - j) % stride == 0] * 2,
        "strided": [lambda i, j: abs(i - j) <= stride, lambda i, j: (i - j) % stride == 0],
        "fixed": [lambda i, j: i // stride == j // stride, lambda i, j: j % stride >= stride - c],
    }[mode]
    both = torch.stack([mask_of(a, N), mask_of(b, N)])
    return both.tril() if causal else both


@in_one_test("causal", [False, True])
@in_one_test(("stride", "c"), [(1, 1), (4, 1), (8, 3), (5, 5), (40, 2)])
@in_one_test("mode", MODES)
@in_one_test("N", LENGTHS)
def test_is_a_dense_mask(N: int, mode: str, stride: int, c: int, causal: bool) -> None:
    def fast(q, k, v, key_mask):
        return attend_sparse(q, k, v, mode=mode, stride=stride, n_summaries=c, causal=causal, key_mask=key_mask)

    check(fast, pattern(mode, N, stride=stride, c=c, causal=causal), N)


@in_one_test("mode", ["strided", "fixed"])
@in_one_test("all_a", [False, True])
def test_layers_may_take_turns_instead_of_heads(mode: str, all_a: bool) -> None:
    q, k, v = heads(17)
    o = attend_sparse(q, k, v, mode=mode, stride=4, n_summaries=2, n_heads_a=2 if all_a else 0)
    assert (o - dense(q, k, v, pattern(mode, 17, stride=4, c=2, causal=False)[0 if all_a else 1])).abs().max() <= EXACT


@in_one_test("mode", MODES)
@torch.no_grad()
def test_a_causal_layer_is_the_dense_mask_in_calls_of_any_size(mode: str) -> None:
    torch.manual_seed(0)
    layer = CausalSparseAttention(8, 2, mode=mode, stride=4, n_summaries=2).double()
    x = torch.randn(2, 18, 8, dtype=torch.float64)
    q, k, v = (split_heads(to(x), 2) for to in (layer.to_q, layer.to_k, layer.to_v))
    expected = layer.to_out(merge_heads(dense(q, k, v, pattern(mode, 18, stride=4, c=2, causal=True))))
    state, outputs = None, []
    for piece in x.split([5, 1, 1, 6, 5], dim=1):
        y, state = layer(piece, None, state)
        outputs.append(y)
    assert (torch.cat(outputs, dim=1) - expected).abs().max() <= EXACT
