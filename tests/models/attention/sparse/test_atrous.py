"""Atrous attention and the cache of its causal form against a dense mask."""

import torch

from models.attention.layers.multi_head import merge_heads, split_heads
from models.attention.sparse.atrous import attend_atrous
from models.attention.sparse.causal_atrous import CausalAtrousAttention
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, check, dense, mask_of


@in_one_test("causal", [False, True])
@in_one_test("rate", [1, 2, 3, 8, 40])
@in_one_test("N", LENGTHS)
def test_is_a_dense_mask_of_residues(N: int, rate: int, causal: bool) -> None:
    def fast(q, k, v, key_mask):
        return attend_atrous(q, k, v, rate=rate, causal=causal, key_mask=key_mask)

    check(fast, lambda i, j: (i - j) % rate == 0 and (j <= i or not causal), N)


@torch.no_grad()
def test_a_causal_layer_is_the_dense_mask_in_calls_of_any_size() -> None:
    layer, x = CausalAtrousAttention(8, 2, rate=3).double(), torch.randn(2, 14, 8, dtype=torch.float64)
    q, k, v = (split_heads(to(x), 2) for to in (layer.to_q, layer.to_k, layer.to_v))
    expected = layer.to_out(merge_heads(dense(q, k, v, mask_of(lambda i, j: j <= i and (i - j) % 3 == 0, 14))))
    state, outputs = None, []
    for piece in x.split([5, 1, 1, 4, 3], dim=1):
        y, state = layer(piece, None, state)
        outputs.append(y)
    assert (torch.cat(outputs, dim=1) - expected).abs().max() <= EXACT
