"""Query heads that share keys and values: they are multi-head attention whose heads of keys and values repeat."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention.layers.grouped_heads import GroupedHeads
from models.layers import LAYERS
from models.parts.positions import rotate, rotation_at
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
D, H, D_K = 12, 4, 6  # the heads are wider together than the model
every_layer = in_one_test("name", ["causal_softmax", "sliding_window"])


def make(name: str, **options: Any) -> GroupedHeads:
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, d_head=D_K, **({"window": 5} if name == "sliding_window" else {}), **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer.double()


def tokens(B: int, N: int) -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@every_layer
@in_one_test("H_k", [1, 2])
@torch.no_grad()
def test_shared_keys_are_keys_that_repeat(name: str, H_k: int) -> None:
    """Neighbouring heads share them. In pieces, with rows of unequal lengths."""
    grouped, full = make(name, n_kv_heads=H_k, bias=True), make(name, bias=True)
    weights = grouped.state_dict()
    for to in ("to_k", "to_v"):
        for part in ("weight", "bias"):
            heads = weights[f"{to}.{part}"].unflatten(0, (H_k, D_K))
            weights[f"{to}.{part}"] = torch.stack([heads[h * H_k // H] for h in range(H)]).flatten(0, 1)
    full.load_state_dict(weights)
    x, mask, t = tokens(2, 17), torch.arange(17) < torch.tensor([[17], [9]]), torch.arange(17)[None]
    states: list[Any] = [None, None]
    for begin, end in ((0, 8), (8, 9), (9, 17)):
        turned = rotation_at(t[:, begin:end], D_K, base=100.0, dtype=torch.float64)
        (y, states[0]), (expected, states[1]) = (
            layer(x[:, begin:end], mask[:, begin:end], state, rotation=turned) for layer, state in zip((grouped, full), states, strict=True)
        )
        seen = mask[:, begin:end, None]
        assert ((y - expected) * seen).abs().max() <= EXACT
    assert states[0]["k"].shape[1] == H_k
    assert {n: tuple(tensor.shape[1:]) for n, tensor in grouped.init_state(1).items()} == grouped.state_shapes


@every_layer
@torch.no_grad()
def test_q_and_k_are_normalised_before_they_are_rotated(name: str) -> None:
    layer, x = make(name, n_kv_heads=2, qk_norm=True, norm_eps=1e-3), tokens(1, 4)
    turned = rotation_at(torch.arange(4)[None], D_K, base=100.0, dtype=torch.float64)
    q, k, v = layer.heads(x, turned)
    assert (q.shape, k.shape, v.shape) == ((1, H, 4, D_K), (1, 2, 4, D_K), (1, 2, 4, D_K))
    for head, to, norm, n in ((q, layer.to_q, layer.q_norm, H), (k, layer.to_k, layer.k_norm, 2)):
        raw = to(x).unflatten(-1, (n, D_K)).transpose(1, 2)
        unit = raw / (raw.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
        assert (head - rotate(unit, turned)).abs().max() <= EXACT
    assert (v - layer.to_v(x).unflatten(-1, (2, D_K)).transpose(1, 2)).abs().max() <= EXACT


@every_layer
@in_one_test(
    ("options", "biases"),
    [
        ({}, []),
        ({"bias": True}, ["to_k", "to_out", "to_q", "to_v"]),
        ({"bias": True, "out_bias": False}, ["to_k", "to_q", "to_v"]),
        ({"out_bias": True}, ["to_out"]),
    ],
)
def test_the_output_may_have_another_bias_than_q_k_and_v(name: str, options: dict[str, bool], biases: list[str]) -> None:
    assert sorted(n.removesuffix(".bias") for n, _ in make(name, **options).named_parameters() if n.endswith("bias")) == biases


@every_layer
@in_one_test("H_k", [0, 3, 8])
def test_heads_that_do_not_divide_are_refused(name: str, H_k: int) -> None:
    with pytest.raises(ValueError, match=f"n_heads=4 is not a multiple of n_kv_heads={H_k}"):
        make(name, n_kv_heads=H_k)
