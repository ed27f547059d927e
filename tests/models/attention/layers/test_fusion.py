"""Modalities that become one vector."""

import torch
from torch import Tensor

from models.attention.layers.fusion import ModalityFusion, fuse
from tests.cases import in_one_test
from tests.models.attention.scores import EXACT, drawn

B, P, D, A = 3, 4, 5, 6
h = drawn(B, P, D, seed=1)
there = torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])


def weights() -> dict[str, Tensor]:
    return {"W": drawn(A, D, seed=2), "b": drawn(A, seed=3), "c": drawn(A, seed=4)}


def test_computes_what_the_loops_compute() -> None:
    """exp(alpha) above and below the line; a row in which nothing is there gets 0."""
    given, expected = weights(), torch.zeros(B, D, dtype=torch.float64)
    for row in range(B):
        present = [p for p in range(P) if there[row, p]]
        exps = [torch.exp(given["c"] @ torch.clamp(given["W"] @ h[row, p] + given["b"], min=0)) for p in present]
        for p, e in zip(present, exps, strict=True):
            expected[row] += e / sum(exps) * h[row, p]
    assert (fuse(h, **given, mask=there) - expected).abs().max() <= EXACT
    assert torch.equal(fuse(h, **given, mask=there)[2], torch.zeros(D).double())


@in_one_test("d_hidden", [1, 8, 64])
def test_the_module_begins_where_it_can_learn(d_hidden: int) -> None:
    torch.manual_seed(1)
    fusion = ModalityFusion(D, d_hidden).double()
    y = fusion(h, there)
    assert torch.equal(y, fuse(h, W=fusion.W, b=fusion.b, c=fusion.c, mask=there))
    assert y.shape == (B, D)
    assert not fusion.b.any()
    y.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in fusion.parameters())
