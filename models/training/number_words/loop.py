"""The loop: a batch, a step of AdamW, now and then a look at held-out numbers and a checkpoint, until the last step or a signal."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.search import greedy
from models.training import checkpoints
from models.training.loop import TrainingError
from models.training.number_words.batches import FIRST_DIGITS, Batches
from models.training.number_words.config import NumberWordsConfig
from models.training.number_words.evaluation import exact
from models.training.number_words.words import draw
from models.training.optimisation import learning_rate, optimizer_of

LOSS_STEPS = 20  # of which the curve keeps the mean
EVALUATION_SEED = "evaluation"


@dataclass(frozen=True)
class Point:
    """A point of a curve: `value` is nats an output token, or a share of exact answers."""

    step: int
    minutes: float  # of training, without evaluation and checkpoints
    value: float


@dataclass
class Progress:
    """How far a run is. Beside the tensors, all that a checkpoint has to hold."""

    step: int = 0
    seconds: float = 0.0  # of training
    losses: list[Point] = field(default_factory=list)
    exact: list[Point] = field(default_factory=list)  # of held-out numbers, greedy
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last point

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Progress":
        curves = {name: [Point(**point) for point in values[name]] for name in ("losses", "exact")}
        return cls(**(values | curves))


def train(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    config: NumberWordsConfig,
    folder: Path,
    *,
    show: Callable[[Progress], None] = lambda progress: None,
    on_evaluation: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train `model` from the newest checkpoint in `folder` on; leave one there whenever this returns.

    Raises TrainingError for a loss that is not finite (the last checkpoint is from before), ResumeError for a foreign checkpoint.
    """
    batches = Batches(
        tokenizer,
        batch=config.batch,
        seed=config.seed,
        languages=config.languages,
        max_digits=config.max_digits,
        all_digits_from=round(config.all_digits_from * config.max_steps),
    )
    random = Random(EVALUATION_SEED)
    sample = [
        draw(random, min_digits=FIRST_DIGITS, max_digits=config.max_digits, languages=config.languages, evaluation=True)
        for _ in range(config.evaluation_size)
    ]
    optimizer = optimizer_of(model, config)
    checkpoint = checkpoints.newest(folder)
    progress = Progress.read(checkpoints.load(checkpoint, model, optimizer)) if checkpoint else Progress()
    model.train()
    while progress.step < config.max_steps and not stopping():
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress.step / config.max_steps, config)
        batch = batches(progress.step)
        logits = model(batch.source, batch.mask, batch.previous)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        progress.pending.append(loss.item())
        progress.step += 1
        progress.seconds += time.monotonic() - began
        if not math.isfinite(progress.pending[-1]):
            raise TrainingError(f"the loss of step {progress.step} is {loss}; lower learning_rate={config.learning_rate} and begin anew")
        if progress.step % LOSS_STEPS == 0:
            progress.losses.append(Point(progress.step, progress.seconds / 60, sum(progress.pending) / LOSS_STEPS))
            progress.pending.clear()
        if progress.step * config.evaluations >= (len(progress.exact) + 1) * config.max_steps:
            right = exact(model, tokenizer, sample, greedy)
            progress.exact.append(Point(progress.step, progress.seconds / 60, sum(right) / len(right)))
            on_evaluation(progress)
        if progress.step % config.checkpoint_steps == 0:
            checkpoints.save(folder, progress.step, model, optimizer, asdict(progress))
        show(progress)
    checkpoints.save(folder, progress.step, model, optimizer, asdict(progress))
    return progress
