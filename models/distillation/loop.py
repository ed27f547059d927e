"""The loop: a batch, a step of AdamW, now and then a look at held-out text and a checkpoint, until the steps are done or a signal comes."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from attnserve.errors import AttnserveError
from models.distillation.batches import Batches
from models.distillation.evaluation import Likeness
from models.distillation.objectives import Embedder, end_to_end_loss, transfer_loss
from models.distillation.plan import Plan
from models.distillation.student import new_parameters
from models.training import checkpoints

LOSS_STEPS = 5  # of which the curve keeps the mean


class DistillationError(AttnserveError):
    """The run cannot go on: the message says what to change."""


@dataclass
class Progress:
    """How far a run is. Beside the tensors, all that a checkpoint has to hold."""

    step: int = 0
    tokens: int = 0  # without padding
    seconds: float = 0.0  # of training
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, mean of the last LOSS_STEPS)
    looks: list[tuple[int, float, float]] = field(default_factory=list)  # (step, mean cosine, rank correlation) of held-out text
    pending: list[float] = field(default_factory=list)


def distil(
    teacher: Embedder,
    student: Embedder,
    batches: Batches,
    plan: Plan,
    folder: Path,
    *,
    look: Callable[[], Likeness],
    show: Callable[[Progress, float], None] = lambda progress, tokens_per_s: None,
    on_look: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train the student's blocks from the newest checkpoint in `folder` on, and leave one there whenever this returns.

    Embeddings and what is around the blocks stay the teacher's. Raises DistillationError for a loss that is not finite, ResumeError for a
    foreign checkpoint.
    """
    blocks = student.encoder.blocks
    optimizer = _optimizer(student, teacher, plan)
    checkpoint = checkpoints.newest(folder)
    progress = Progress(**checkpoints.load(checkpoint, blocks, optimizer)) if checkpoint else Progress()
    began_at = progress.tokens, progress.seconds
    while progress.step < plan.steps and not stopping():
        if progress.step * plan.looks >= len(progress.looks) * plan.steps:
            _look(progress, look, on_look)
        began = time.monotonic()
        batch = batches(progress.step)
        loss = _step(teacher, student, batch, optimizer, plan, progress.step)
        progress.step += 1
        progress.tokens += int(batch[1].sum())
        progress.seconds += time.monotonic() - began
        if not math.isfinite(loss):
            raise DistillationError(f"the loss of step {progress.step} is {loss}; lower the learning rates and begin anew")
        progress.pending.append(loss)
        if progress.step % LOSS_STEPS == 0:
            progress.losses.append((progress.step, sum(progress.pending) / len(progress.pending)))
            progress.pending.clear()
        if progress.step % plan.checkpoint_steps == 0:
            checkpoints.save(folder, progress.step, blocks, optimizer, asdict(progress))
        show(progress, (progress.tokens - began_at[0]) / max(progress.seconds - began_at[1], 1e-9))
    if progress.step == plan.steps and len(progress.looks) <= plan.looks:
        _look(progress, look, on_look)
    checkpoints.save(folder, progress.step, blocks, optimizer, asdict(progress))
    return progress


def _look(progress: Progress, look: Callable[[], Likeness], on_look: Callable[[Progress], None]) -> None:
    found = look()
    progress.looks.append((progress.step, found.cosine, found.ranks))
    on_look(progress)


def _optimizer(student: Embedder, teacher: Embedder, plan: Plan) -> AdamW:
    """Two groups, new parameters and the others of the blocks, each with a rate of its own; what a phase leaves alone has no gradient."""
    new = set(new_parameters(student.encoder, teacher.encoder))
    named = dict(student.encoder.named_parameters())
    groups = [[p for name, p in named.items() if name in new], [p for name, p in named.items() if name not in new and "blocks." in name]]
    return AdamW([{"params": group} for group in groups], lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)


def _step(teacher: Embedder, student: Embedder, batch: tuple[torch.Tensor, torch.Tensor], optimizer: AdamW, plan: Plan, step: int) -> float:
    """One update; the loss before it."""
    student.encoder.requires_grad_(False)
    for group, rate in zip(optimizer.param_groups, plan.rates(step), strict=True):
        group["lr"] = rate
        for parameter in group["params"]:
            parameter.requires_grad_(rate > 0)
    transferring = plan.phase(step) == "transfer"
    loss = transfer_loss(teacher, student, batch) if transferring else end_to_end_loss(teacher, student, batch, plan)
    optimizer.zero_grad(set_to_none=True)
    if loss.requires_grad:  # with rates of 0 there is nothing to learn
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"] if p.grad is not None], plan.clip)
        optimizer.step()
    return loss.item()
