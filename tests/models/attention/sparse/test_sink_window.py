"""Attention to a window and the first tokens: causal softmax up to the window, a constant state beyond."""

import pytest
import torch
from torch import Tensor

from models.attention.sparse.sink_window import SinkWindowAttention
from models.parts.positions import rotate
from tests.models.attention.scores import EXACT
from tests.models.attention.windows import D_K, SIZES, D, G, H, W, at, every_cut, in_pieces, tokens


def make(**options: object) -> SinkWindowAttention:
    torch.manual_seed(0)
    layer = SinkWindowAttention(D, H, **(SIZES | options))
    return layer.double()


def reference(layer: SinkWindowAttention, x: Tensor) -> Tensor:
    """The paper's section 3.2 in loops: the tokens that are seen get the positions 0, 1, 2, .. within the cache."""
    q, k, v = layer.heads(x)
    k, v = layer.for_every_head(k), layer.for_every_head(v)
    outputs = []
    for t in range(x.shape[1]):
        seen = [j for j in range(t + 1) if j < G or j > t - (W - G)]
        places = torch.arange(len(seen))[None]
        scores = rotate(q[:, :, t : t + 1], at(places[:, -1:])) @ rotate(k[:, :, seen], at(places)).mT * D_K**-0.5
        outputs.append(scores.softmax(-1) @ v[:, :, seen])
    return layer.to_out(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2))


@every_cut
@torch.no_grad()
def test_positions_are_those_within_the_cache(pieces: tuple[int, ...]) -> None:
    """In any pieces; the slots are reused several times."""
    layer, x = make(counted=False), tokens(2, 40)
    y, state = in_pieces(layer, x, pieces)
    assert (y - reference(layer, x)).abs().max() <= EXACT
    assert {name: tensor.shape[1:] for name, tensor in state.items()} == layer.state_shapes


@torch.no_grad()
def test_a_call_writes_only_the_slots_of_its_tokens() -> None:
    """So a call that is lost can be made again, and the state before it stays valid."""
    layer, x, mask = make(), tokens(2, 30), torch.arange(3) < torch.tensor([[3], [1]])
    _, before = layer(x[:, :25])
    _, after = layer(x[:, 25:28], mask, before)
    changed = (before["k"] != after["k"]).any(dim=(1, 3))  # (B, S)
    assert changed.sum(dim=1).tolist() == [3, 1]
    again = {"k": after["k"], "v": after["v"], "n": before["n"]}
    for name, tensor in layer(x[:, 25:28], mask, again)[1].items():
        assert torch.equal(tensor, after[name])
    assert torch.equal(layer(x[:, 25:28], mask, again)[0], layer(x[:, 25:28], mask, before)[0])


def test_positions_of_many_tokens_need_a_count() -> None:
    with pytest.raises(ValueError, match="counted=False"):
        make(counted=False)(tokens(1, 2))
