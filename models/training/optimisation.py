"""AdamW and the learning rate. Loshchilov & Hutter 2017, arXiv:1711.05101; the cosine: arXiv:1608.03983."""

import math

from torch import nn
from torch.optim import AdamW

from models.training.config import Optimisation


def optimizer_of(model: nn.Module, config: Optimisation) -> AdamW:
    """For matrices (and what has more axes) weights decay. Scales and biases are vectors; 0 is no better for them than another value."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, eps=1e-8, fused=True)


def learning_rate(share: float, config: Optimisation) -> float:
    """When `share` of the budget, 0 to 1, is used up: a straight rise, then a cosine or a straight line down."""
    if share < config.warm_up:
        return config.learning_rate * share / config.warm_up
    left = 1 - (share - config.warm_up) / (1 - config.warm_up)  # 1 .. 0
    height = (1 - math.cos(math.pi * left)) / 2 if config.decay == "cosine" else left
    return config.learning_rate * (config.last_learning_rate + (1 - config.last_learning_rate) * height)
