"""Untrained models, AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) and learning rates (cosine decay: arXiv:1608.03983)."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import AdamW

from models.folders.config_fields import bounded
from models.folders.folder import CheckpointError, check_memory
from models.training.config import ConfigError, Optimisation

Model = TypeVar("Model", bound=nn.Module)


def untrained(make: Callable[[], Model], shape: Mapping[str, Any], config_file: Path, *, seed: int) -> Model:
    """Return the model that `make` builds from the fields of `shape`, with parameters drawn from the seed.

    Raises ConfigError if the shape is not possible, CheckpointError if the model does not fit into memory.
    """
    try:
        bounded(shape)
        with torch.device("meta"):
            check_memory(config_file, make())
        torch.manual_seed(seed)
        return make()
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config_file}: model: {error}") from error


def optimizer_of(model: nn.Module, config: Optimisation) -> AdamW:
    """Return AdamW with weight decay only for parameters of two or more axes. Scales and biases have no weight decay, because they need
    not be near 0."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, eps=1e-8, fused=True)


def learning_rate(share: float, config: Optimisation) -> float:
    """Return the learning rate when `share` (0 to 1) of the budget is used: a linear rise, then a cosine or linear decay."""
    if share < config.warm_up:
        return config.learning_rate * share / config.warm_up
    left = 1 - (share - config.warm_up) / (1 - config.warm_up)  # falls from 1 to 0
    height = (1 - math.cos(math.pi * left)) / 2 if config.decay == "cosine" else left
    return config.learning_rate * (config.last_learning_rate + (1 - config.last_learning_rate) * height)
