"""`Task`: everything about a training that the trainer does not know. Text, pictures, number words and distillation are tasks.

A task has the model with its optimizer, computes the loss of a step, evaluates, and writes the result. `trainer.py` has the loop with
budget, gradients, checkpoints and curves; `run.py` has the output folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from models.training.config import Budget

Point = dict[str, float]  # of a curve: step, tokens and minutes of training so far, and the task's figures
Report = dict[str, Any]  # the content of run.json


class Loss(NamedTuple):
    """The loss of one batch."""

    objective: Tensor  # (), to be minimised
    reported: Tensor  # (), for the curve: the objective without auxiliary terms
    n_tokens: int  # of the batch, without padding


@dataclass
class Progress:
    """The state of a run beside its tensors; every checkpoint holds it."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, without evaluation and checkpoints
    losses: list[Point] = field(default_factory=list)  # of training batches
    evaluations: list[Point] = field(default_factory=list)  # of held-out data
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last point

    def point(self, figures: dict[str, float]) -> Point:
        return {"step": self.step, "tokens": self.tokens, "minutes": self.seconds / 60, **figures}

    def curves(self) -> Report:
        """The part of run.json that grows during a run."""
        return {name: value for name, value in vars(self).items() if name != "pending"}


class Task(ABC):
    """A training of one model. The batch of a step must depend on seed and step alone, so that a resumed run repeats a straight one."""

    name: str
    budget: Budget
    model: nn.Module  # checkpoints hold its parameters and persistent buffers
    optimizer: Optimizer
    loss_steps: ClassVar[int]  # the mean of this many losses is one point of the curve
    evaluates_untrained: ClassVar[bool] = False  # an extra evaluation before the first step

    @abstractmethod
    def learning_rates(self, step: int, share: float) -> Sequence[float]:
        """One rate for each parameter group, when `share` of the budget is used."""

    @abstractmethod
    def loss(self, step: int) -> Loss:
        """The loss of the batch of `step`."""

    def after_step(self) -> None:  # noqa: B027  # most tasks have no such changes
        """Changes of the model that are not made by gradients."""

    def figures(self, loss: float) -> dict[str, float]:
        """Figures of the loss curve, from a mean of reported losses."""
        return {"loss": loss}

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Figures of the model on a sample of held-out data."""

    @abstractmethod
    def describe(self, progress: Progress) -> list[str]:
        """The latest figures in words, for the progress bar."""

    @abstractmethod
    def facts(self) -> Report:
        """The task's part of run.json. A folder can only be resumed with equal `config` and `data`."""

    @abstractmethod
    def plot(self, report: Report, out: Path) -> None:
        """Draw the curves of run.json into the folder."""

    @abstractmethod
    def finish(self, out: Path, report: Report) -> str:
        """Write the trained model and its card, and add the last evaluation to `report`. Returns a summary of one line."""
