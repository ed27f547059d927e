"""The softmax with one more in its denominator."""

import torch
from torch import nn

from models.attention.scoring.softmax1 import Softmax1Attention, attend_softmax1, attend_softmax1_online, softmax1
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, B, H, by_loops, drawn, pairs, qkv

scores = drawn(B, H, 5, 7, seed=1)


def test_computes_what_the_loops_compute() -> None:
    (q, k, v), (mask, bias) = qkv(), pairs()
    expected = by_loops(lambda h, q, k: 0.5 * q @ k, q, k, v, mask, bias, beside=1.0)
    assert (attend_softmax1(q, k, v, scale=0.5, mask=mask, bias=bias) - expected).abs().max() <= EXACT


def test_a_layer_is_torch_multihead_attention_with_add_zero_attn() -> None:
    torch.manual_seed(0)
    layer, x = Softmax1Attention(12, H).double(), drawn(B, 6, 12, seed=2)
    theirs = nn.MultiheadAttention(12, H, add_zero_attn=True, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.to_q.weight, layer.to_k.weight, layer.to_v.weight]))
        theirs.in_proj_bias.copy_(torch.cat([layer.to_q.bias, layer.to_k.bias, layer.to_v.bias]))
        theirs.out_proj.load_state_dict(layer.to_out.state_dict())
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    expected, _ = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)
    assert (layer(x, mask) - expected).abs().max() <= EXACT


@in_one_test("dtype", [torch.float16, torch.float32])
def test_large_scores_stay_finite_with_their_gradients(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    weights = softmax1(x, mask)
    assert torch.equal(weights, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype))
    weights.square().sum().backward()
    assert torch.isfinite(x.grad).all()


@in_one_test("keys_at_once", [1, 3, 64])
@in_one_test("n_k", [1, 2, 63, 64, 65])
def test_some_keys_after_the_others_give_the_same(n_k: int, keys_at_once: int) -> None:
    (q, k, v), (mask, _) = qkv(n_k=n_k), pairs(n_k=n_k)
    q = 20 * q  # maxima that move from piece to piece
    for seen in (None, mask, mask[:, :, -1:], mask[..., -1:]):
        whole = attend_softmax1(q, k, v, scale=0.5, mask=seen)
        assert (attend_softmax1_online(q, k, v, scale=0.5, mask=seen, keys_at_once=keys_at_once) - whole).abs().max() <= EXACT
