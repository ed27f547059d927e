"""The learning rate over the budget."""

import pytest

from models.training.config import TrainingConfig
from models.training.optimisation import learning_rate
from tests.models.training.texts import changed


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_rate_rises_then_falls_to_its_last_value(config: TrainingConfig, decay: str) -> None:
    c = changed(config, decay=decay, warm_up=0.1, last_learning_rate=0.1, learning_rate=2.0)
    assert learning_rate(0.0, c) == 0
    assert learning_rate(0.05, c) == pytest.approx(1.0)
    assert learning_rate(0.1, c) == pytest.approx(2.0)
    assert learning_rate(0.55, c) == pytest.approx(1.1)  # half way down
    assert learning_rate(1.0, c) == pytest.approx(0.2)
    falling = [learning_rate(0.1 + i / 100, c) for i in range(91)]
    assert falling == sorted(falling, reverse=True)


def test_without_warm_up_it_begins_at_its_highest(config: TrainingConfig) -> None:
    assert learning_rate(0.0, changed(config, warm_up=0.0, learning_rate=2.0)) == pytest.approx(2.0)
