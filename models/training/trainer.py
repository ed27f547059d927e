"""The training loop of all tasks: steps, evaluations and checkpoints, until the budget is used or a signal arrives."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from models.training import checkpoints
from models.training.task import Progress, Task
from service.errors import AttnserveError


class TrainingError(AttnserveError):
    """A training failed. The message names the cause and a remedy."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of a run after a step, for a progress bar."""

    step: int
    share: float  # the share of the budget that is used, 0 to 1
    figures: list[str]
    tokens_per_s: float
    left_s: float


def train(
    task: Task,
    folder: Path,
    *,
    show: Callable[[Moment], None] = lambda moment: None,
    on_evaluation: Callable[[Progress], None] = lambda progress: None,
    on_checkpoint: Callable[[], None] = lambda: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train from the newest checkpoint in `folder`, or from the start, and save a checkpoint there at the end. `on_checkpoint` is called
    before every evaluation and checkpoint.

    Raises TrainingError if the loss of a step is not finite (no checkpoint is saved after that step), ResumeError if the checkpoint
    belongs to another model.
    """
    budget = task.budget
    checkpoint = checkpoints.newest(folder)
    progress = Progress(**checkpoints.load(checkpoint, task.model, task.optimizer)) if checkpoint else Progress()
    resumed_at = progress.tokens, progress.seconds

    def evaluate() -> None:
        on_checkpoint()
        progress.evaluations.append(progress.point(task.evaluate()))
        on_evaluation(progress)

    def save() -> None:
        on_checkpoint()
        checkpoints.save(folder, progress.step, task.model, task.optimizer, asdict(progress))

    if task.evaluates_untrained and not progress.evaluations:
        evaluate()
    while (share := budget.share(progress.step, progress.seconds)) < 1 and not stopping():
        began = time.monotonic()
        loss, n_tokens = _step(task, progress.step, share)
        progress.step += 1
        progress.tokens += n_tokens
        progress.seconds += time.monotonic() - began
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {progress.step} is {loss}; lower learning_rate and train into another folder")
        progress.pending.append(loss)
        share = budget.share(progress.step, progress.seconds)
        if progress.step % task.loss_steps == 0:
            progress.losses.append(progress.point(task.figures(sum(progress.pending) / len(progress.pending))))
            progress.pending.clear()
        if share * budget.evaluations >= len(progress.evaluations) + (0 if task.evaluates_untrained else 1):
            evaluate()
        if progress.step % budget.checkpoint_steps == 0:
            save()
        tokens, seconds = progress.tokens - resumed_at[0], max(progress.seconds - resumed_at[1], 1e-9)
        left_s = progress.seconds * (1 - share) / share
        show(Moment(step=progress.step, share=share, figures=task.describe(progress), tokens_per_s=tokens / seconds, left_s=left_s))
    save()
    return progress


def _step(task: Task, step: int, share: float) -> tuple[float, int]:
    """Do a training step. Returns the reported loss and the number of tokens."""
    loss = task.loss(step)
    update(task.optimizer, task.model, task.learning_rates(step, share), loss.objective, clip=task.budget.clip)
    task.after_step()
    return loss.reported.item(), loss.n_tokens


def update(optimizer: Optimizer, model: nn.Module, rates: Sequence[float], loss: Tensor, *, clip: float) -> None:
    """Clip the norm of the gradients to `clip` and do one optimizer step, with one learning rate per parameter group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    if loss.requires_grad:  # False if all parameters are frozen
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after SIGINT or SIGTERM. A second signal has its usual effect."""
    received: list[int] = []
    earlier: dict[int, Any] = {}

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        for known, handler in earlier.items():
            signal.signal(known, handler)

    for stop in (signal.SIGINT, signal.SIGTERM):
        earlier[stop] = signal.signal(stop, on_signal)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
