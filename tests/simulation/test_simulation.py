"""Schedules of the whole service. One that goes wrong is run again with `python -m tests.simulation --seeds 1 --first SEED`."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.gateways import simulate_gateways
from tests.simulation.world import explain, simulate

SCHEDULES = 300
PARTS = 6
GATEWAY_SCHEDULES = 150
FOUND = (141, 254)  # failures of the store that nobody waited for any more


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.slow
def test_no_schedule_loses_doubles_or_changes_anything(part: int) -> None:
    stats: Counter[str] = Counter()
    for seed in range(part, SCHEDULES, PARTS):
        result = simulate(seed)
        assert not result.wrong, explain(result)
        stats.update(result.stats)
    for what in ("runs", "kept", "forks", "moves", "deaths", "pauses", "cached tokens", "StoreFailed", "RuntimeFailed"):
        assert stats[what], f"these schedules have no {what}: they prove less than they seem to"
    assert stats["runs"] > 4 * SCHEDULES / PARTS
    assert stats["streams"] > 3 * SCHEDULES / PARTS


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_went_wrong_once(seed: int) -> None:
    result = simulate(seed)
    assert not result.wrong, explain(result)


@pytest.mark.slow
def test_no_schedule_of_gateways_lets_two_write_or_send_a_run() -> None:
    stats: Counter[str] = Counter()
    for seed in range(GATEWAY_SCHEDULES):
        result = simulate_gateways(seed)
        assert not result.wrong, explain(result)
        assert result.digest == simulate_gateways(seed).digest or seed % 10
        stats.update(result.stats)
    assert stats["pauses"] > GATEWAY_SCHEDULES
    assert stats["connections"] > 5 * GATEWAY_SCHEDULES


@pytest.mark.slow
def test_a_seed_replays_exactly_in_any_process() -> None:
    here = [f"{seed} {simulate(seed).digest}" for seed in range(12)]
    assert here == [f"{seed} {simulate(seed).digest}" for seed in range(12)]
    assert len({line.split()[1] for line in here}) == 12
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation", "--seeds", "12", "--digests"]
        done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[:12] == here
