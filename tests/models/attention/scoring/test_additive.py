"""Scores of a small network."""

import torch
from torch import Tensor

from models.attention.scoring.additive import AdditiveAttention, attend_additive
from tests.cases import in_one_test
from tests.models.attention.scores import D_K, EXACT, B, H, by_loops, drawn, pairs, qkv

A, D_Q = 6, 5


def weights(*heads: int) -> dict[str, Tensor]:
    return {"W_q": drawn(*heads, A, D_Q, seed=6), "W_k": drawn(*heads, A, D_K, seed=7), "w_v": drawn(*heads, A, seed=8)}


def inputs(n_q: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Queries wider than keys."""
    _, k, v = qkv()
    return drawn(B, H, n_q, D_Q, seed=1), k, v


@in_one_test("heads", [(), (H,)], ids=["weights for all heads", "weights a head"])
def test_computes_what_the_loops_compute(heads: tuple[int, ...]) -> None:
    (q, k, v), (mask, bias), given = inputs(), pairs(), weights(*heads)
    W_q, W_k, w_v = (x.expand(H, *x.shape[len(heads) :]) for x in given.values())
    expected = by_loops(lambda h, q, k: w_v[h] @ torch.tanh(W_q[h] @ q + W_k[h] @ k), q, k, v, mask, bias)
    assert (attend_additive(q, k, v, **given, mask=mask, bias=bias) - expected).abs().max() <= EXACT


@in_one_test("n_q", [1, 2, 63, 64, 65, 128])
@in_one_test("queries_at_once", [1, 7, 64])
def test_in_pieces_it_is_the_same(n_q: int, queries_at_once: int) -> None:
    """Whether a mask and a bias have a row for each query, or one for all."""
    (q, k, v), (mask, bias) = inputs(n_q), pairs(n_q)
    for pair_mask, pair_bias in ((mask, bias), (mask[:, :, -1:], bias[:, :, :1]), (mask[0, 0], None), (None, None)):
        given = {**weights(H), "mask": pair_mask, "bias": pair_bias}
        whole = attend_additive(q, k, v, **given, queries_at_once=None)
        assert (attend_additive(q, k, v, **given, queries_at_once=queries_at_once) - whole).abs().max() <= EXACT


def test_a_layer_has_bahdanaus_weights_a_head() -> None:
    """Its rows of to_q are W_q W^Q, for any W_q and W^Q."""
    torch.manual_seed(0)
    layer, x = AdditiveAttention(12, H).double(), drawn(B, 5, 12, seed=1)
    W_Q, W_q = drawn(H, 4, 12, seed=9), drawn(H, 4, 4, seed=10)
    with torch.no_grad():
        layer.to_q.weight.copy_((W_q @ W_Q).flatten(0, 1))
    k, v = (to(x).unflatten(-1, (H, 4)).transpose(1, 2) for to in (layer.to_k, layer.to_v))
    q = torch.einsum("bnd,hkd->bhnk", x, W_Q)
    o = attend_additive(q, k, v, W_q=W_q, W_k=torch.eye(4).double(), w_v=layer.attend.w_v)
    assert (layer(x) - layer.to_out(o.transpose(1, 2).flatten(-2))).abs().max() <= EXACT


def test_its_weights_begin_as_xavier_has_them_and_without_biases() -> None:
    torch.manual_seed(0)
    layer = AdditiveAttention(256, 4)
    for weight, fan in ((layer.to_q.weight, 256 + 64), (layer.to_k.weight, 256 + 64), (layer.attend.w_v, 64 + 1)):
        bound = (6 / fan) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound
    assert layer.to_q.bias is layer.to_k.bias is None
