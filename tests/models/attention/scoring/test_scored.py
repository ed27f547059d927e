"""What the layers have in common that differ in their score alone: pairs, rotations, and that a cache is a triangular mask."""

import pytest
import torch
from torch import nn

from models.attention.scoring.dot import attend_dot
from models.attention.scoring.scored import ScoredAttention
from models.layers import LAYERS
from models.parts.positions import RotationTable
from tests.models.attention.scores import EXACT, by_loops, drawn, pairs, qkv

D, H = 12, 3
NAMES = [name for name, layer in LAYERS.items() if issubclass(layer, ScoredAttention)]
every_score = pytest.mark.parametrize("name", NAMES)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name](D, H).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return layer


def test_the_dot_product_is_its_loops() -> None:
    """The scores with parameters have tests of their own."""
    (q, k, v), (mask, bias) = qkv(), pairs()
    expected = by_loops(lambda h, q, k: q @ k, q, k, v, mask, bias)
    assert (attend_dot(q, k, v, mask=mask, bias=bias) - expected).abs().max() <= EXACT


@every_score
@torch.no_grad()
def test_the_causal_layer_is_the_other_under_a_triangular_mask(name: str) -> None:
    """With the same weights, in one call and in three; at a length that the pieces of the additive score do not divide."""
    layer = make(name)
    causal = LAYERS[f"causal_{name}"](D, H, bias=True).double()
    causal.load_state_dict(layer.state_dict())
    x = drawn(2, 70, D, seed=1)
    expected = layer(x, pair_mask=torch.ones(70, 70, dtype=torch.bool).tril())
    assert (causal(x)[0] - expected).abs().max() <= EXACT
    state, outputs = None, []
    for piece in x.split((3, 66, 1), dim=1):
        y, state = causal(piece, None, state)
        outputs.append(y)
    assert (torch.cat(outputs, dim=1) - expected).abs().max() <= EXACT


@every_score
@torch.no_grad()
def test_a_pair_mask_and_a_pair_bias_reach_the_scores(name: str) -> None:
    """A bias of -1e4 on a pair is as good as a mask; a token without any key gets 0."""
    layer, x = make(name), drawn(2, 70, D, seed=1)
    near = (torch.arange(70)[:, None] - torch.arange(70)[None, :]).abs() <= 1
    bias = torch.where(near, 0.0, -1e4).double()[None, None]
    masked = layer(x, pair_mask=near)
    assert (masked - layer(x, pair_bias=bias)).abs().max() <= EXACT
    assert (masked - layer(x)).abs().max() > 0.01
    near[4] = False
    assert torch.equal(layer(x, pair_mask=near)[:, 4], layer.to_out.bias.expand(2, D))


@every_score
@torch.no_grad()
def test_rotated_scores_know_distances_only_or_the_rotation_is_refused(name: str) -> None:
    layer, x = make(name), drawn(2, 9, D, seed=1)
    table = RotationTable(1009, D // H, base=100.0, dtype=torch.float64)
    here, there = table(torch.arange(9)), table(torch.arange(1000, 1009))
    if layer.capabilities.rotates:
        y = layer(x, rotation=here)
        assert (layer(x, rotation=there) - y).abs().max() <= EXACT
        assert (layer(x) - y).abs().max() > 1e-3
    else:
        with pytest.raises(ValueError, match="AdditiveAttention supports no rotation; add positions to the embeddings"):
            layer(x, rotation=here)
