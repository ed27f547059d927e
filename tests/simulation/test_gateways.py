"""Schedules of gateways that share leases. In a file of its own, so that another worker can run it beside `test_simulation.py`."""

from collections import Counter

from tests.simulation.gateways import simulate_gateways
from tests.simulation.world import explain

SCHEDULES = 150


def test_no_schedule_of_gateways_lets_two_write_or_send_a_run() -> None:
    stats: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        result = simulate_gateways(seed)
        assert not result.wrong, explain(result)
        assert result.digest == simulate_gateways(seed).digest or seed % 10
        stats.update(result.stats)
    assert stats["pauses"] > SCHEDULES
    assert stats["connections"] > 5 * SCHEDULES
