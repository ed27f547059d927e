"""Modalities that become one vector."""

import pytest
import torch
from torch import Tensor

from models.attention.layers.fusion import ModalityFusion, fuse, fusion_weights
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


def test_no_mask_is_a_mask_of_true() -> None:
    assert (fuse(h, **weights()) - fuse(h, **weights(), mask=torch.ones(B, P, dtype=torch.bool))).abs().max() <= EXACT


def test_without_a_query_it_is_the_mean_of_what_is_there() -> None:
    given = weights() | {"c": torch.zeros(A).double()}
    assert (fuse(h, **given) - h.mean(1)).abs().max() <= EXACT
    assert (fuse(h, **given, mask=there)[1] - h[1, [0, 2]].mean(0)).abs().max() <= EXACT


def test_the_order_of_modalities_means_nothing() -> None:
    order = torch.tensor([2, 0, 3, 1])
    beta = fusion_weights(h, **weights(), mask=there)
    assert (fusion_weights(h[:, order], **weights(), mask=there[:, order]) - beta[:, order]).abs().max() <= EXACT
    assert (fuse(h[:, order], **weights()) - fuse(h, **weights())).abs().max() <= EXACT


def test_one_modality_is_its_own_fusion() -> None:
    assert (fuse(h[:, :1], **weights()) - h[:, 0]).abs().max() <= EXACT


def test_what_dominates_is_selected() -> None:
    W = torch.eye(A, D, dtype=torch.float64)
    c = torch.full((A,), 1e3, dtype=torch.float64)
    large = h.clone()
    large[:, 2] = 10.0
    assert (fuse(large, W=W, b=torch.zeros(A).double(), c=c) - large[:, 2]).abs().max() <= EXACT


def test_what_stands_for_a_missing_one_changes_nothing() -> None:
    other = torch.where(there.unsqueeze(-1), h, 1e3)
    assert torch.equal(fuse(other, **weights(), mask=there), fuse(h, **weights(), mask=there))


def test_gradients() -> None:
    given = weights()
    tensors = [x.clone().requires_grad_() for x in (h, given["W"], given["b"], given["c"])]
    assert torch.autograd.gradcheck(lambda h, W, b, c: fuse(h, W=W, b=b, c=c, mask=there), tensors)


@pytest.mark.parametrize("d_hidden", [1, 8, 64])
def test_the_module_begins_where_it_can_learn(d_hidden: int) -> None:
    torch.manual_seed(1)
    fusion = ModalityFusion(D, d_hidden).double()
    y = fusion(h, there)
    assert torch.equal(y, fuse(h, W=fusion.W, b=fusion.b, c=fusion.c, mask=there))
    assert y.shape == (B, D)
    assert not fusion.b.any()
    y.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in fusion.parameters())


def test_it_learns_which_modality_tells_the_truth() -> None:
    """One of three vectors is marked by its first number, and its second is the answer: fitted to a tenth of what the mean leaves."""
    torch.manual_seed(0)
    fusion = ModalityFusion(2, 8)
    marked = torch.nn.functional.one_hot(torch.randint(0, 3, (128,)), 3).float()  # (B, P)
    h = torch.stack([marked, torch.randn(128, 3)], dim=-1)
    truth = (h[..., 1] * marked).sum(1)
    optimiser = torch.optim.Adam(fusion.parameters(), lr=0.05)
    for _ in range(200):
        error = (fusion(h)[:, 1] - truth).square().mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
    assert error < 0.1 * (h[..., 1].mean(1) - truth).square().mean()
