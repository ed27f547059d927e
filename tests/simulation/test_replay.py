"""A seed gives the same schedule, event by event. In a file of its own, so that another worker can run it beside `test_simulation.py`."""

import os
import subprocess
import sys

from tests.simulation.world import simulate


def test_a_seed_replays_exactly_in_any_process() -> None:
    here = [f"{seed} {simulate(seed).digest}" for seed in range(12)]
    assert here == [f"{seed} {simulate(seed).digest}" for seed in range(12)]
    assert len({line.split()[1] for line in here}) == 12
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation", "--seeds", "12", "--digests"]
        done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[:12] == here
