"""The learning rate over the budget, and which parameters decay."""

import pytest
import torch
from torch import nn

from models.training.config import TrainingConfig
from models.training.optimisation import learning_rate, optimizer_of


def changed(config: TrainingConfig, **values: object) -> TrainingConfig:
    return TrainingConfig.model_validate(config.model_dump() | values)


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


def test_only_matrices_decay(config: TrainingConfig) -> None:
    """With gradients of 0, AdamW changes nothing but what decays."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_of(model, changed(config, weight_decay=0.5)).step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"0.weight"}
