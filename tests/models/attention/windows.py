"""For the tests of layers with a window and first tokens: their sizes, their rotations, and a text in pieces."""

import torch
from torch import Tensor

from models.attention.layers.causal import CausalLayer, State
from models.parts.positions import Rotation, rotation_at
from tests.cases import in_one_test
from tests.models.attention.scores import drawn

D, H, H_K, D_K, BASE = 8, 4, 2, 6, 100.0
W, G, PIECE = 7, 2, 3
SIZES = {"d_head": D_K, "window": W, "n_first": G, "piece": PIECE, "n_kv_heads": H_K}

every_cut = in_one_test("pieces", [(40,), (1,) * 40, (3, 1, 2, 3, 1, 1, 29)])


def tokens(B: int, N: int) -> Tensor:
    return drawn(B, N, D, seed=1)


def at(t: Tensor) -> Rotation:
    return rotation_at(t, D_K, base=BASE, dtype=torch.float64)


def turned(t: Tensor) -> Rotation:
    return at(t)._replace(t=t, near={W: at(t.clamp_max(W - 1))})


def in_pieces(layer: CausalLayer, x: Tensor, pieces: tuple[int, ...]) -> tuple[Tensor, State]:
    outputs, state, begin = [], None, 0
    for n in pieces:
        t = torch.arange(begin, begin + n).expand(len(x), n)
        y, state = layer(x[:, begin : begin + n], None, state, rotation=turned(t))
        outputs.append(y)
        begin += n
    return torch.cat(outputs, dim=1), state
