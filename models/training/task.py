"""Defines `Task`, the part of a training that differs between text, pictures, number words and distillation.

A task has the model with its optimizer, computes the loss of a step, evaluates the model, and writes the result. The parts that do not
differ are in `trainer.py` (the loop with budget, gradients, checkpoints and curves) and `run.py` (the output folder).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from models.training.config import Budget

Point = dict[str, float]  # a point of a curve: step, tokens and minutes of training so far, and the task's figures
Report = dict[str, Any]  # the content of run.json


class Loss(NamedTuple):
    """The loss of one batch."""

    objective: Tensor  # scalar tensor that is minimised
    reported: Tensor  # scalar tensor for the loss curve: the objective without auxiliary losses
    n_tokens: int  # tokens in the batch, without padding


@dataclass
class Progress:
    """The state of a run, besides the tensors of model and optimizer. Every checkpoint contains it."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # seconds of training, without evaluations and checkpoints
    losses: list[Point] = field(default_factory=list)  # the curve on training batches
    evaluations: list[Point] = field(default_factory=list)  # the curve on held-out data
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last point of `losses`

    def point(self, figures: dict[str, float]) -> Point:
        return {"step": self.step, "tokens": self.tokens, "minutes": self.seconds / 60, **figures}

    def curves(self) -> Report:
        """Return the part of run.json that grows during a run."""
        return {name: value for name, value in vars(self).items() if name != "pending"}


class Task(ABC):
    """The training of one model. A batch must depend only on seed and step, so that a resumed run gets the same batches."""

    name: str
    budget: Budget
    model: nn.Module  # checkpoints hold its parameters and persistent buffers
    optimizer: Optimizer
    loss_steps: ClassVar[int]  # each point of the curve is the mean of this many losses
    evaluates_untrained: ClassVar[bool] = False  # whether to evaluate once before the first step

    @abstractmethod
    def learning_rates(self, step: int, share: float) -> Sequence[float]:
        """Return a learning rate for each parameter group, when `share` of the budget is used."""

    @abstractmethod
    def loss(self, step: int) -> Loss:
        """Compute the loss of the batch of `step`."""

    def after_step(self) -> None:  # noqa: B027  # not abstract, because most tasks update nothing here
        """Update values that are not trained by gradients, such as codebooks. By default nothing is updated."""

    def figures(self, loss: float) -> dict[str, float]:
        """Convert a mean of reported losses to the figures of the loss curve."""
        return {"loss": loss}

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Evaluate the model on a sample of held-out data and return the figures."""

    @abstractmethod
    def describe(self, progress: Progress) -> list[str]:
        """Return the latest figures as text for the progress bar."""

    @abstractmethod
    def facts(self) -> Report:
        """Return the task's part of run.json. A run can only be resumed with the same `config` and `data`."""

    @abstractmethod
    def plot(self, report: Report, out: Path) -> None:
        """Draw the curves of run.json (`report`) into the folder."""

    def keep(self, out: Path) -> None:  # noqa: B027  # not abstract, because most tasks write their model at the end only
        """Write the model as it is, before every evaluation and checkpoint: a run may be cut off. By default, write nothing."""

    @abstractmethod
    def finish(self, out: Path, report: Report) -> str:
        """Write the trained model and its card, and add the final evaluation to `report`. Returns a one-line summary."""
