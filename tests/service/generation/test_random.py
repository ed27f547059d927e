"""Random numbers of a place: the published numbers, their spread, and that nothing but seed and position matters."""

import numpy as np
import pytest

from service.generation.sampling.random import UniformCache, philox, uniform

LARGEST = 2**64 - 1


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_known_answers(counter: str, key: str, answer: str) -> None:
    got = philox(np.array([words(counter)], np.uint64).T, np.array([words(key)], np.uint64).T)
    assert got[:, 0].tolist() == words(answer)


def test_seed_and_position_use_all_their_bits() -> None:
    seeds = np.array([0, 1, 2**32, LARGEST, 0, 0, 0], np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 2**32, LARGEST], np.uint64)
    assert len(set(uniform(seeds, positions).tolist())) == len(seeds)


def test_the_numbers_are_spread_evenly() -> None:
    numbers = uniform(np.full(100_000, 5, np.uint64), np.arange(100_000, dtype=np.uint64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_squared = float(((counts - 5000.0) ** 2 / 5000).sum())
    assert chi_squared < 43.8, "19 degrees of freedom, one chance in a thousand"
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


def test_a_number_is_the_same_beside_any_others() -> None:
    seeds, positions = np.arange(50, dtype=np.uint64) * 7919, np.arange(50, dtype=np.uint64) ** 3
    together = uniform(seeds, positions)
    alone = [uniform(seeds[at : at + 1], positions[at : at + 1])[0] for at in range(50)]
    assert together.tolist() == alone


def test_the_cache_gives_the_same_numbers_whatever_its_rows_held_before() -> None:
    cache = UniformCache(4)
    picked = np.random.default_rng(0)
    for _ in range(200):
        rows = picked.permutation(4)[: picked.integers(1, 5)]
        seeds = picked.choice(np.array([0, 3, LARGEST], np.uint64), len(rows))
        positions = picked.choice(np.array([0, 1, 31, 32, 33, 63, 64, 65, 128, LARGEST], np.uint64), len(rows))
        ahead = cache.ahead(rows, seeds, positions)
        assert len(ahead) >= UniformCache.LEAST
        for after, numbers in enumerate(ahead):
            assert numbers.tolist() == uniform(seeds, positions + np.uint64(after)).tolist()
