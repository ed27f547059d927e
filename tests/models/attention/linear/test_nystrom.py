"""Nyström attention: landmarks beside padding, the iterative inverse, and the formula written out."""

from itertools import pairwise

import torch
from torch import Tensor

from models.attention.linear.landmarks import Landmarks, segment_means
from models.attention.linear.nystrom import attend_nystrom, iterative_inverse
from tests.cases import in_one_test
from tests.models.attention.test_causal_layers import EXACT

B, H, D_K, D_V, L = 2, 2, 4, 3, 4
SCALE = D_K**-0.5


def draw(N: int, *widths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, N, width, generator=generator, dtype=torch.float64) for width in widths]


# Landmarks


def test_padding_anywhere_is_as_if_it_were_not_there() -> None:
    (x,) = draw(12, D_K)
    mask = torch.rand(B, 12, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[1] = False
    means, exist = segment_means(torch.where(mask[:, None, :, None], x, 1e6), L, mask=mask)
    alone, _ = segment_means(x[:1, :, mask[0]], L)
    assert (means[0] - alone[0]).abs().max() <= EXACT
    assert exist[0].all()
    assert not exist[1].any()
    assert not means[1].any()


# The inverse


def attention_matrix(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, H, n, D_K, generator=generator, dtype=torch.float64) for _ in range(2))
    return torch.softmax(q @ k.mT * SCALE, dim=-1)


def test_rounds_lead_to_the_pseudo_inverse() -> None:
    A = attention_matrix(8)
    errors = [float((A @ iterative_inverse(A, n) @ A - A).abs().max()) for n in (2, 6, 30)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] <= 1e-9


def test_every_matrix_begins_by_its_own_norms() -> None:
    """Not by the largest of the batch."""
    A = attention_matrix(8)
    beside_another = torch.cat([A, 100 * attention_matrix(8, seed=1)])
    assert torch.equal(iterative_inverse(beside_another)[:B], iterative_inverse(A))


def test_a_matrix_of_nothing_has_the_inverse_0() -> None:
    assert not iterative_inverse(torch.zeros(1, 3, 3)).any()


# The attention


@in_one_test("n_iterations", [6, None])
@in_one_test("lengths", [(11, 4), (11, 3), (5, 0)])
def test_the_formula_for_every_row_alone(lengths: tuple[int, int], n_iterations: int | None) -> None:
    q, k, v = draw(11, D_K, D_K, D_V)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    o = attend_nystrom(q, k, v, n_landmarks=L, query_mask=mask, key_mask=mask, n_iterations=n_iterations, short_by_softmax=False)
    for b, n in enumerate(lengths):
        if n == 0:
            assert not o[b].any()
            continue
        qb, kb, vb = (x[b, :, :n] for x in (q, k, v))
        bounds = [i * n // min(n, L) for i in range(min(n, L) + 1)]
        q_l, k_l = (torch.stack([x[:, i:j].mean(1) for i, j in pairwise(bounds)], dim=1) for x in (qb, kb))
        left, A, right = (torch.softmax(a @ c.mT * SCALE, dim=-1) for a, c in ((qb, k_l), (q_l, k_l), (q_l, kb)))
        inverse = torch.linalg.pinv(A) if n_iterations is None else iterative_inverse(A)
        assert (o[b, :, :n] - left @ inverse @ right @ vb).abs().max() <= 1e-8  # exact inverses of cond(A) ~ 100


def test_queries_may_be_others_than_the_keys_and_landmarks_may_be_given() -> None:
    (q,), (k, v) = draw(13, D_K), draw(7, D_K, D_V, seed=1)
    assert attend_nystrom(q, k, v, n_landmarks=L).shape == (B, H, 13, D_V)
    exist = torch.ones(B, 3, dtype=torch.bool)
    of_q, of_k = Landmarks(q[:, :, :3], exist), Landmarks(k[:, :, 4:], exist)
    o = attend_nystrom(q, k, v, landmarks=(of_q, of_k), n_iterations=None)
    left, A, right = (torch.softmax(a @ c.mT * SCALE, dim=-1) for a, c in ((q, of_k.means), (of_q.means, of_k.means), (of_q.means, k)))
    assert (o - left @ torch.linalg.inv(A) @ right @ v).abs().max() <= 1e-8
