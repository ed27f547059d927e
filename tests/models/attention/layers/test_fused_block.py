"""The pre-norm block with one projection for queries, keys and values."""

import pytest
import torch
from torch import Tensor, nn

from models.attention.layers.fused_block import FusedBlock, attend_fused, from_separate, to_separate
from models.attention.layers.softmax import SoftmaxAttention
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

D = 12
SHAPES = {"standard": (3, None), "narrow heads": (3, 5), "one head": (1, 5), "one wide head": (1, D)}
every_shape = in_one_test(("n_heads", "d_head"), SHAPES.values(), ids=SHAPES)
mask = torch.tensor([[True] * 7, [True] * 3 + [False] * 4, [False] * 7])
x = drawn(3, 7, D, seed=1)


def make(n_heads: int, d_head: int | None, **options: float) -> FusedBlock:
    torch.manual_seed(0)
    block = FusedBlock(D, n_heads, d_head=d_head, **options).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return block


@every_shape
def test_equals_a_norm_and_torch_multihead_attention_of_the_heads(n_heads: int, d_head: int | None) -> None:
    block = make(n_heads, d_head)
    q, k, v = (part.unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in block.to_qkv(block.norm(x)).chunk(3, dim=-1))
    o = torch.stack([_attended(q[b], k[b], v[b], mask[b]) for b in range(3)])
    assert (block(x, mask) - block.to_out(o.transpose(1, 2).flatten(-2))).abs().max() <= EXACT


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """(H, N, D_k) each, (N,): by torch's operator over the keys that are there."""
    return nn.functional.scaled_dot_product_attention(q, k[:, seen], v[:, seen]) if seen.any() else torch.zeros_like(q)


@every_shape
def test_separated_it_is_a_norm_and_the_standard_layer_and_back(n_heads: int, d_head: int | None) -> None:
    block = make(n_heads, d_head)
    norm, attention = to_separate(block)
    assert (attention(norm(x), mask) - block(x, mask)).abs().max() <= EXACT
    again = from_separate(norm, attention)
    assert again.state_dict().keys() == block.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in block.state_dict().items())


@every_shape
@in_one_test("bias", [False, True])
def test_fused_it_is_the_standard_layer_behind_its_norm(n_heads: int, d_head: int | None, bias: bool) -> None:
    """One wide head: W^O goes into W^V."""
    torch.manual_seed(1)
    norm = nn.LayerNorm(D, eps=1e-3, bias=bias).double()
    attention = SoftmaxAttention(D, n_heads, d_head=d_head, bias=bias).double()
    if bias:
        for to in (attention.to_q, attention.to_k, attention.to_v, *([attention.to_out] if d_head == D else [])):
            nn.init.zeros_(to.bias)
    block = from_separate(norm, attention)
    assert (block(x, mask) - attention(norm(x), mask)).abs().max() <= EXACT
    assert not any(parameter.is_set_to(source) for parameter in block.parameters() for source in attention.parameters())


def test_what_the_block_has_no_place_for_is_refused() -> None:
    norm, attention = nn.LayerNorm(D), SoftmaxAttention(D, 3)
    nn.init.constant_(attention.to_q.bias, 0.25)
    with pytest.raises(ValueError, match=r"to_q has a bias of up to 0.25, which the fused block cannot store"):
        from_separate(norm, attention)
    norm, attention = to_separate(make(1, D))
    nn.init.constant_(attention.to_out.bias, 0.5)
    with pytest.raises(ValueError, match=r"to_out has a bias of up to 0.5"):
        from_separate(norm, attention)
    with pytest.raises(ValueError, match=r"dropout=1.0 must be at least 0 and below 1"):
        FusedBlock(D, dropout=1.0)


def test_parts_and_sizes() -> None:
    """8 heads of 64 unless told otherwise; biases in the norm and in W^O alone."""
    sizes = {name: tuple(tensor.shape) for name, tensor in FusedBlock(D).named_parameters()}
    assert sizes == {"norm.weight": (D,), "norm.bias": (D,), "to_qkv.weight": (3 * 512, D), "to_out.weight": (D, 512), "to_out.bias": (D,)}
    assert isinstance(FusedBlock(D, 1, d_head=D).to_out, nn.Identity)
    assert isinstance(FusedBlock(D, 1, d_head=D - 1).to_out, nn.Linear)


def test_dropout_leaves_out_weights_and_outputs_while_training_and_keeps_the_mean() -> None:
    block = make(3, None, dropout=0.25)
    assert torch.equal(block.eval()(x), make(3, None)(x))
    torch.manual_seed(0)
    y = block.train()(x)
    assert 0.15 < (y == 0).double().mean() < 0.35
    q_and_k_zero = torch.cat([torch.zeros(2 * D, D), torch.eye(D)]).double()
    o = attend_fused(torch.ones(1, 400, D).double(), W_qkv=q_and_k_zero, n_heads=3, dropout=0.25)  # 400 equal weights a query
    assert abs(o.mean() - 1) < 0.01
    assert o.std() > 0.01
