"""What every layer of an encoder promises. Causal ones: test_causal_layers.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.attention.layers.causal import CausalLayer
from models.layers import LAYERS
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32: 24 bits, sums of a few hundred terms; relative to the largest output where that is above 1
WITH_EPS = 1e-5  # linear attention divides by z + 1e-6, so its weights sum to a little less than 1

D, H = 12, 3
LENGTHS = (1, 2, 63, 64, 65)

SEEING_BOTH_WAYS = [name for name, layer in LAYERS.items() if not issubclass(layer, CausalLayer)]

every_layer = pytest.mark.parametrize("name", SEEING_BOTH_WAYS)
every_layer_by_content = pytest.mark.parametrize("name", [name for name in SEEING_BOTH_WAYS if not LAYERS[name].capabilities.ordered])
every_true_gradient = pytest.mark.parametrize("name", [name for name in SEEING_BOTH_WAYS if not LAYERS[name].capabilities.straight_through])
every_average = pytest.mark.parametrize("name", [name for name in SEEING_BOTH_WAYS if LAYERS[name].capabilities.averages])


def make(name: str, *, d_model: int = D, n_heads: int = H, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer with all parameters random, biases too."""
    torch.manual_seed(0)
    layer = LAYERS[name](d_model, n_heads, **LAYERS[name].examples.small)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def tokens(B: int, N: int, *, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lengths_mask(*lengths: int) -> Tensor:
    return torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]


@in_one_test("name", ["local", "longformer", "hybrid", "lsh", "flash"])
def test_a_text_shorter_than_a_block_is_not_filled_up_to_one(name: str) -> None:
    """By default, blocks have 64 tokens or more: below, pairs cost N², beside projections that cost N."""

    def products(N: int) -> int:
        with FlopCounterMode(display=False) as counter:
            LAYERS[name](8, 2)(torch.randn(1, N, 8))
        return counter.get_total_flops()

    assert products(64) > 8 * products(16)


@in_one_test("name", ["softmax", "narrow", "wide"])
@torch.no_grad()
def test_computes_what_torch_computes_of_each_head(name: str) -> None:
    """With padding, and with a row in which all is padding. The other layers' definitions stand in their own tests."""
    layer, x, mask = make(name), tokens(3, 5), lengths_mask(5, 3, 0)
    heads = []
    for h in range(H):
        own = slice(h * layer.d_head, (h + 1) * layer.d_head)
        if name == "narrow":
            q, k, v = (F.linear(x[..., own], to.weight[h], to.bias[h]) for to in (layer.to_q, layer.to_k, layer.to_v))
        else:
            q, k, v = (F.linear(x, to.weight[own], to.bias[own]) for to in (layer.to_q, layer.to_k, layer.to_v))
        heads.append(F.scaled_dot_product_attention(q, k, v, mask[:, None]).nan_to_num())
    assert (layer(x, mask) - layer.to_out(torch.cat(heads, dim=-1))).abs().max() <= EXACT


@every_layer
@in_one_test("N", LENGTHS)
def test_float32_is_float64_rounded_at_every_length(name: str, N: int) -> None:
    layer, x = make(name), tokens(2, N)
    exact = layer(x)
    rounded = layer.float()(x.float())
    assert rounded.shape == x.shape
    assert (rounded - exact).abs().max() <= ROUNDED * exact.abs().max().clamp(min=1)


# Masks


@every_layer
def test_a_row_without_keys_gets_zero_and_finite_gradients(name: str) -> None:
    """Zero before the output projection, so its bias is all that comes out."""
    layer, x = make(name), tokens(2, 4).requires_grad_()
    y = layer(x, lengths_mask(4, 0))
    assert torch.equal(y[1], layer.to_out.bias.expand(4, D))
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


@every_layer
def test_padding_changes_nothing_for_the_others(name: str) -> None:
    """Outputs depend neither on values in the padding, nor on its length, nor on other rows. No mask means that every token is real."""
    layer, x, mask = make(name), tokens(2, 7), lengths_mask(4, 7)
    y = layer(x, mask)
    other = x.clone()
    other[0, 4:] = 1e3
    assert torch.equal(layer(other, mask)[0, :4], y[0, :4])
    for row, n in enumerate((4, 7)):
        for alone in (layer(x[row : row + 1, :n]), layer(x[row : row + 1, :n], lengths_mask(n))):
            assert (alone[0] - y[row, :n]).abs().max() <= EXACT


@pytest.mark.parametrize("name", [name for name in SEEING_BOTH_WAYS if LAYERS[name].capabilities.pads_to])
@in_one_test("beside", [-1, 0, 1])
def test_what_is_padded_inside_may_come_padded(name: str, beside: int) -> None:
    """At one token less than a multiple of what the layer names, at the multiple, and at one token more."""
    m = LAYERS[name].examples.small[LAYERS[name].capabilities.pads_to]
    layer, N = make(name), 2 * m + beside
    x = tokens(1, 3 * m)
    y = layer(x[:, :N])
    full = -(-N // m) * m
    assert (layer(x[:, :full], lengths_mask(N, full)[:1])[:, :N] - y).abs().max() <= EXACT


# Symmetries and limits


@every_layer_by_content
def test_permuting_tokens_permutes_the_output(name: str) -> None:
    layer, x = make(name), tokens(2, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert (layer(x[:, order]) - layer(x)[:, order]).abs().max() <= EXACT


@every_average
def test_a_constant_value_passes_through(name: str) -> None:
    """Weights sum to 1: with every value equal to the bias of to_v, the answer is that bias, whoever asks."""
    layer, x = make(name), tokens(2, 9)
    nn.init.zeros_(layer.to_v.weight)
    if hasattr(layer, "to_v_global"):
        layer.to_v_global.load_state_dict(layer.to_v.state_dict())
    expected = F.linear(layer.to_v.bias.flatten(), layer.to_out.weight, layer.to_out.bias)
    assert (layer(x) - expected).abs().max() <= WITH_EPS


@every_layer
@in_one_test("x", [tokens(2, 8) * 1e3, torch.ones(2, 8, D).double(), torch.zeros(2, 8, D).double()], ids=["big", "1", "0"])
def test_large_and_equal_inputs_stay_finite(name: str, x: Tensor) -> None:
    layer, x = make(name, dtype=torch.float32), x.float().requires_grad_()
    y = layer(x, lengths_mask(8, 5))
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


@every_true_gradient
def test_gradients(name: str) -> None:
    """Against finite differences, with a row of padding only."""
    layer = make(name, d_model=4, n_heads=2)
    mask = lengths_mask(5, 3, 0)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, mask), (x,), fast_mode=True)


@in_one_test("name", LAYERS)
@torch.no_grad()
def test_a_state_dict_comes_back(name: str) -> None:
    """Causal layers too."""
    layer, x = make(name), tokens(1, 5)
    copy = LAYERS[name](D, H, **LAYERS[name].examples.small).double()
    copy.load_state_dict(layer.state_dict())
    y, again = (each(x)[0] if isinstance(each, CausalLayer) else each(x) for each in (layer, copy))
    assert torch.equal(y, again)


@every_layer
@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_masks_without_overflow(name: str, dtype: torch.dtype) -> None:
    """-1e9 would be -inf in float16, and a row of -inf is NaN."""
    y = make(name, dtype=dtype)(tokens(2, 6, dtype=dtype), lengths_mask(6, 0))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
