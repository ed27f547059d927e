"""Hybrid attention against one matrix of weights that are not summed yet: exponentials near, products of features far."""

import torch
from torch import Tensor

from models.attention.linear.hybrid import attend_hybrid
from models.attention.linear.learned_maps import FUNCTIONS, LearnedMap
from models.attention.linear.linear import attend_features
from tests.cases import in_one_test
from tests.models.attention.sparse.patterns import EXACT, LENGTHS, ROUNDED, heads, some_keys

C = 4
MAPS = tuple(FUNCTIONS)


def phi_q(x: Tensor) -> Tensor:
    """D_φ = 3."""
    return torch.stack([x.sum(-1).exp(), x.cos().sum(-1) + 5, torch.ones_like(x[..., 0])], dim=-1)


def phi_k(x: Tensor) -> Tensor:
    return phi_q(2 * x)


def by_matrix(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    N = q.shape[2]
    blocks = torch.arange(N) // C
    near = (blocks[:, None] - blocks).abs() <= 1
    weights = torch.where(near, (q @ k.mT * q.shape[-1] ** -0.5).exp(), 0.5 * phi_q(q) @ phi_k(k).mT)
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :]
    total = weights.sum(-1, keepdim=True)
    return weights @ v / (total + (total == 0))


@in_one_test("N", LENGTHS)
def test_is_one_matrix_of_weights(N: int) -> None:
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, ROUNDED)):
        qkv = heads(N, dtype=dtype)
        for mask in (None, some_keys(N)):
            assert (attend_hybrid(*qkv, phi_q, phi_k, block=C, gain=0.5, key_mask=mask) - by_matrix(*qkv, mask)).abs().max() <= tolerance


@in_one_test("N", [1, 2, 15, 16, 63, 64, 65, 127, 128])
def test_up_to_two_blocks_it_fills_up_by_a_token_at_most(N: int) -> None:
    mapped = []
    attend_hybrid(*heads(N), phi_q, lambda x: phi_k(mapped.append(x.shape[2]) or x), block=64)
    assert N <= mapped[0] <= N + 1


def test_without_blocks_it_is_linear_attention() -> None:
    q, k, v = heads(9)
    assert (attend_hybrid(q, k, v, phi_q, phi_k, block=0) - attend_features(phi_q(q), phi_k(k), v, eps=0.0)).abs().max() <= EXACT


def test_large_scores_stay_finite_near_and_far() -> None:
    q, k, v = (1e3 * x.float() for x in heads(17))
    maps = [LearnedMap("positive", 2, 4) for _ in range(2)]
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend_hybrid(*given, *maps, block=C)
    o.sum().backward()
    assert torch.isfinite(o).all()
    assert all(torch.isfinite(x.grad).all() for x in given)


@in_one_test("size", [1e-19, 1e-21, 1e-23])
def test_a_far_weight_too_small_for_float32_is_no_weight(size: float) -> None:
    """Queries of padding have nothing else: what they get is finite, and does not reach the others."""
    q, k, v = (x.float() for x in heads(24))
    mask = torch.arange(24).expand(2, -1) < 6
    o = attend_hybrid(q, k, v, lambda x: torch.full_like(x, size), lambda x: torch.full_like(x, size), block=C, key_mask=mask)
    assert torch.isfinite(o).all()
    assert (o.abs() <= v[:, :, :6].abs().amax((2, 3), keepdim=True) * (1 + ROUNDED)).all()


@in_one_test("sigma", [1, 4, 5, 10])
@in_one_test("block", [0, C])
@torch.no_grad()
def test_the_positive_map_does_not_underflow(sigma: float, block: int) -> None:
    """exp(-|x'|² / 2) of q and of k is 0 in float32 from 5 sigma on, at heads of 32; the weights are not."""
    generator = torch.Generator().manual_seed(0)
    qkv = [sigma * torch.randn(2, 2, 40, 32, generator=generator) for _ in range(3)]
    maps = [LearnedMap("positive", 2, 32, seed=seed) for seed in range(2)]
    mask = torch.arange(40) < torch.tensor([[40], [23]])
    o = attend_hybrid(*qkv, *maps, block=block, key_mask=mask)
    exact = attend_hybrid(*(x.double() for x in qkv), *(phi.double() for phi in maps), block=block, key_mask=mask)
    assert exact.abs().amax() > sigma / 10
    assert (o - exact).abs().max() <= 1e-5 * sigma * exact.abs().max()


# The maps


@in_one_test("kind", MAPS)
def test_products_of_features_are_not_negative(kind: str) -> None:
    q, k = heads(30, n=2)
    maps = [LearnedMap(kind, 2, 4).double() for _ in range(2)]
    assert (maps[0](q) @ maps[1](k).mT >= 0).all()
    assert maps[0](q).shape[-1] == {"elu": 4, "hedgehog": 8, "taylor": 21, "positive": 8}[kind]


def test_the_positive_map_begins_as_an_estimate_of_the_exponential() -> None:
    """Mean over many draws; the variance is small for short q and k."""
    q, k = (0.3 * x.float() for x in heads(6, n=2))
    estimates = []
    for seed in range(300):
        phi = LearnedMap("positive", 2, 4, seed=seed)
        estimates.append((phi(q) @ phi(k).mT).detach())
    exact = (q @ k.mT * 4**-0.5).exp()
    assert (torch.stack(estimates).mean(0) / exact - 1).abs().max() < 0.1
