"""How many replicas a pool needs."""

from types import SimpleNamespace

import pytest

from service.deployment.scaling import ByLoad


@pytest.mark.parametrize(
    ("loads", "target", "wanted"),
    [
        ([0.0, 0.0], 0.5, 0),
        ([0.5, 0.5], 0.5, 2),
        ([0.5, 0.6], 0.5, 3),
        ([1.0, 0.0, 0.0], 0.7, 2),
        ([8.0], 0.5, 16),
    ],
)
def test_as_many_as_share_the_load_at_the_target(loads: list[float], target: float, wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics={"load": dict(enumerate(loads))}, target_num_replicas=7)
    assert ByLoad(target)(context) == (wanted, {})


@pytest.mark.parametrize("metrics", [None, {}, {"load": {}}])
def test_while_no_replica_has_said_anything_the_number_stays(metrics: object) -> None:
    assert ByLoad(0.5)(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=7)) == (7, {})
