"""How long tokens may wait for others."""

import pytest

from service.runtime.pacing import loaded_hand_over_s


@pytest.mark.parametrize(
    ("wait_s", "runs", "loaded_s"),
    [(0.00375, 1, 0.00375), (0.00375, 8, 0.004), (0.00375, 16, 0.008), (0.00375, 32, 0.01), (0.1, 32, 0.1), (0, 32, 0)],
)
def test_tokens_of_many_runs_may_wait_longer(wait_s: float, runs: int, loaded_s: float) -> None:
    assert loaded_hand_over_s(wait_s, runs) == pytest.approx(loaded_s)
