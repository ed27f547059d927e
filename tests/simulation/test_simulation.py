"""Schedules of the whole service, and of gateways that share leases. `python -m tests.simulation --first SEED` runs one again."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation.gateways import simulate_gateways
from tests.simulation.mutants import MUTANTS, Planted
from tests.simulation.world import Result, explain, simulate

SEEDS = range(60)


def seeds(end: int) -> pytest.MarkDecorator:
    """`make test` runs the schedules of SEEDS, and `make test-all` those up to `end` as well."""
    further = pytest.param(range(len(SEEDS), end), marks=pytest.mark.exhaustive, id="all")
    return pytest.mark.parametrize("seeds", [pytest.param(SEEDS, id="sixty"), further])


def statistics(simulate: Callable[[int], Result], seeds: range) -> Counter[str]:
    """Run the schedules, of which none may go wrong."""
    stats: Counter[str] = Counter()
    for seed in seeds:
        result = simulate(seed)
        assert not result.wrong, explain(result)
        stats.update(result.stats)
    return stats


@seeds(450)
def test_no_schedule_loses_doubles_or_changes_anything(seeds: range) -> None:
    stats = statistics(simulate, seeds)
    for what in ("kept", "forks", "moves", "deaths", "pauses", "cached tokens", "StoreFailed", "RuntimeFailed"):
        assert stats[what], f"these schedules have no {what}: they prove less than they seem to"
    assert stats["runs"] > 4 * len(seeds)
    assert stats["streams"] > 3 * len(seeds)


@seeds(150)
def test_no_schedule_of_gateways_lets_two_write_or_send_a_run(seeds: range) -> None:
    stats = statistics(simulate_gateways, seeds)
    assert stats["pauses"] > len(seeds)
    assert stats["connections"] > 5 * len(seeds)


@pytest.mark.parametrize(
    ("simulate", "plant"),
    [
        pytest.param(simulate, plant, marks=[pytest.mark.exhaustive] if number else [], id=f"{subject}: {plant.__name__}")
        for subject, (simulate, plants) in MUTANTS.items()
        for number, plant in enumerate(plants)
    ],
)
def test_a_planted_bug_is_found(simulate: Callable[[int], Result], plant: Callable[[], Planted]) -> None:
    """`make test` plants the first bug of each subject."""
    with plant():
        assert any(simulate(seed).wrong for seed in SEEDS)


def test_a_seed_replays_exactly_in_another_process() -> None:
    here = [f"{seed} {simulate(seed).digest}" for seed in range(6)]
    assert len({line.split()[1] for line in here}) == 6
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "6"]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == here
