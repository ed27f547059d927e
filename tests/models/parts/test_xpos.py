"""xPos against its definition, pair of columns by pair of columns."""

import math

import pytest
import torch

from models.parts.positions import RotationTable, rotate
from models.parts.xpos import xpos
from tests.cases import in_one_test

EXACT = 1e-10  # float64
N, D_K = 7, 6


def by_definition(q: list[float], k: list[float], distance: int, *, gamma: float, scale_base: float) -> float:
    """The score of a query that stands `distance` tokens after the key."""
    total = 0.0
    for i in range(D_K // 2):
        angle = distance * 10_000 ** (-2 * i / D_K)
        zeta = (i / (D_K / 2) + gamma) / (1 + gamma)
        q_i, k_i = complex(q[i], q[i + D_K // 2]), complex(k[i], k[i + D_K // 2])
        total += zeta ** (distance / scale_base) * (q_i * complex(math.cos(angle), math.sin(angle)) * k_i.conjugate()).real
    return total


@in_one_test("first", [-3, 0, 40])
@in_one_test("options", [{"gamma": 0.4, "scale_base": 512.0}, {"gamma": 1.0, "scale_base": 4.0}])
def test_a_score_depends_on_the_distance_and_fades_with_it(first: int, options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, N, D_K, generator=generator, dtype=torch.float64) for _ in range(2))
    rotation = RotationTable(N, D_K, base=10_000, dtype=torch.float64)(torch.arange(N))
    of_q, of_k = xpos(rotation, torch.arange(N) + first, **options)
    scores = rotate(q, of_q) @ rotate(k, of_k).mT
    for i in range(N):
        for j in range(N):
            wanted = by_definition(q[0, 0, i].tolist(), k[0, 0, j].tolist(), i - j, **options)
            assert scores[0, 0, i, j].item() == pytest.approx(wanted, abs=EXACT)


def test_the_middle_of_a_text_as_its_origin_keeps_float32_within_its_range() -> None:
    n = 65_536
    rotation = RotationTable(n, 4, base=10_000)(torch.arange(n))
    assert not all(torch.isfinite(x).all() for turned in xpos(rotation, torch.arange(n)) for x in (turned.cos, turned.sin))
    assert all(torch.isfinite(x).all() for turned in xpos(rotation, torch.arange(n) - n // 2) for x in (turned.cos, turned.sin))


@in_one_test("options", [{"gamma": 0.0}, {"scale_base": -1.0}])
def test_rates_that_are_none_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        xpos(RotationTable(1, 4, base=10_000)(torch.arange(1)), torch.arange(1), **options)
