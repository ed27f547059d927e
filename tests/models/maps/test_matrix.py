"""Attention as a matrix, for every layer of LAYERS: it makes the answers out of the values, and sums to what the layer says."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention.gated.gau import GatedProjections
from models.attention.layers.multi_head import split_heads
from models.layers import LAYERS
from models.maps.matrix import attention_matrix
from models.parts.positions import rotation_at
from tests.cases import in_one_test

EXACT = 1e-9  # float64: the same formula, summed in another order; Nyström's rounds cube their matrix
WITH_EPS = 1e-5  # normalisers with an eps

D, H, N = 12, 3, 21  # N is no multiple of D_v = 4

every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, bias=True, **(LAYERS[name].examples.small | options))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    if hasattr(layer, "to_v_global"):  # so that a token has one value, whoever asks for it
        layer.to_v_global.load_state_dict(layer.to_v.state_dict())
    return layer.double()


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(2, N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.arange(N) < torch.tensor([[N], [13]])


def values_and_answers(layer: nn.Module, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """v and o on either side of A, (B, H, N, D_v) each, as they pass."""
    passed: dict[str, Tensor] = {}
    if layer.answers == "recurrence":
        execution = layer.recurrence

        def watched(q: Tensor, k: Tensor, v: Tensor, S: Tensor, **rates: Tensor) -> tuple[Tensor, Tensor]:
            o, S = execution(q, k, v, S, **rates)
            passed.update(v=v, o=o)
            return o, S

        layer.recurrence = watched
        layer(x, mask)
        del layer.recurrence
        return passed["v"], passed["o"]
    hooks = [
        layer.to_v.register_forward_hook(lambda module, inputs, v: passed.update(v=v)),
        layer.get_submodule(layer.answers).register_forward_pre_hook(lambda module, inputs: passed.update(o=inputs[0])),
    ]
    layer(x, mask)
    for hook in hooks:
        hook.remove()
    v, o = passed["v"], passed["o"]
    if isinstance(layer, GatedProjections):
        return F.silu(v).unsqueeze(1), (o / F.silu(layer.to_u(x))).unsqueeze(1)
    if hasattr(layer, "to_gate"):
        o = o / layer.to_gate(x).sigmoid()
    return v if v.dim() == 4 else split_heads(v, H), o if o.dim() == 4 else split_heads(o, H)


@every_layer
@in_one_test("mask", [None, MASK], ids=["all tokens", "padding"])
@torch.no_grad()
def test_it_makes_the_answers_out_of_the_values(name: str, mask: Tensor | None) -> None:
    layer, x = make(name), tokens()
    A = attention_matrix(layer, x, mask)
    v, o = values_and_answers(layer, x, mask)
    assert A.shape == (*v.shape[:2], N, N)
    seen = torch.ones_like(MASK) if mask is None else mask
    error = ((A @ v - o).transpose(1, 2)[seen]).abs().max()
    forgotten = f"A v is not the answer: does {type(layer).__name__} state its `answers`, `gates` and `value_of_one`?"
    assert error <= EXACT * o.abs().max().clamp_min(1), forgotten
    assert not A.transpose(1, 2)[~seen].any()


@every_layer
@torch.no_grad()
def test_it_is_causal_and_averages_as_the_layer_says(name: str) -> None:
    layer = make(name)
    A = attention_matrix(layer, tokens(), MASK)
    if layer.capabilities.causal:
        assert not A.triu(1).any()
    if layer.capabilities.averages:
        assert (A.sum(-1) - MASK[:, None].double()).abs().max() <= WITH_EPS
    assert not A[1, :, :, 13:].any()


def test_the_layer_is_left_as_it_was_after_an_error_too() -> None:
    for name in ("softmax", "retention"):
        layer = make(name)
        with pytest.raises(RuntimeError):
            attention_matrix(layer, tokens()[..., :5])
        assert "recurrence" not in vars(layer)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


# Dense references


PAST = torch.ones(N, N, dtype=torch.bool).tril()


@torch.no_grad()
def test_positions_reach_the_layer() -> None:
    layer, x = make("softmax"), tokens()
    assert not attention_matrix(layer, x, pair_mask=PAST).triu(1).any()
    turned = rotation_at(torch.arange(N)[None], 4, base=100.0, dtype=x.dtype)
    assert (attention_matrix(layer, x, rotation=turned) - attention_matrix(layer, x)).abs().max() > 1e-3


# What the matrices tell


@pytest.mark.parametrize(
    ("name", "options", "averages"),
    [
        ("linear", {"feature_map": "relu"}, False),
        ("linear", {"feature_map": "taylor_2"}, True),
        ("causal_linear", {"feature_map": "relu_squared"}, False),
        ("efficient", {"normalisation": "scaling"}, False),
        ("gau", {"normalisation": "softmax"}, True),
        ("gau", {"normalisation": "length"}, False),
        ("causal_gau", {"normalisation": "softmax_plus"}, True),
    ],
)
@torch.no_grad()
def test_an_option_that_changes_what_weights_sum_to_says_so(name: str, options: dict, averages: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, bias=True, **options).double()
    sums = attention_matrix(layer, tokens()).sum(-1)
    assert layer.capabilities.averages is averages
    assert bool((sums - 1).abs().max() <= WITH_EPS) is averages
    assert LAYERS[name](D, H).capabilities == LAYERS[name].capabilities
