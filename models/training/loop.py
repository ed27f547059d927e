"""The loop: a batch, a step of AdamW, now and then a look at held-out text and a checkpoint, until the budget ends or a signal comes."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnserve.errors import AttnserveError
from models.attention.linear.codebook import commitment_loss, update_codebooks
from models.attention.linear.random_features import redraw_features
from models.training import checkpoints
from models.training.config import TrainingConfig
from models.training.corpus import Tokens
from models.training.evaluation import evaluate, first
from models.training.optimisation import learning_rate, optimizer_of
from models.training.packing import Packing

LOSS_STEPS = 10  # of which the curve keeps the mean


class TrainingError(AttnserveError):
    """Training cannot go on: the message says what to change."""


@dataclass(frozen=True)
class Point:
    """A point of a curve."""

    step: int
    tokens: int
    minutes: float  # of training, without evaluation and checkpoints
    bits_per_byte: float


@dataclass
class Progress:
    """How far a run is. Beside the tensors, all that a checkpoint has to hold."""

    step: int = 0
    seconds: float = 0.0  # of training
    losses: list[Point] = field(default_factory=list)  # of training batches
    evaluations: list[Point] = field(default_factory=list)  # of held-out text
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last point, in nats a token

    @classmethod
    def read(cls, values: dict) -> "Progress":
        curves = {name: [Point(**point) for point in values[name]] for name in ("losses", "evaluations")}
        return cls(**(values | curves))

    def share(self, config: TrainingConfig) -> float:
        """Of the budget, used up: 0 to 1."""
        steps = self.step / config.max_steps if config.max_steps else 0.0
        minutes = self.seconds / 60 / config.max_minutes if config.max_minutes else 0.0
        return min(1.0, max(steps, minutes))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a progress bar shows after a step."""

    step: int
    share: float
    loss: float | None  # nats a token, at the last point of the curve
    bits_per_byte: float | None  # the same, of training text
    held_out: float | None  # bits per byte at the last evaluation
    tokens_per_s: float
    left_s: float


def train(
    model: nn.Module,
    tokens: Tokens,
    config: TrainingConfig,
    folder: Path,
    *,
    show: Callable[[Moment], None] = lambda moment: None,
    on_evaluation: Callable[[Progress], None] = lambda progress: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train `model`, where it is, from the newest checkpoint in `folder` on; leave one there whenever this returns.

    Raises TrainingError for a loss that is not finite (the last checkpoint is from before), ResumeError for a foreign checkpoint.
    """
    batches = Packing(tokens.train, context=config.context, batch=config.batch, seed=config.seed, document=tokens.document)
    sample = first(tokens.held_out, config.evaluation_kb * 1000)
    optimizer = optimizer_of(model, config)
    checkpoint = checkpoints.newest(folder)
    progress = Progress.read(checkpoints.load(checkpoint, model, optimizer)) if checkpoint else Progress()
    resumed_at = progress.step, progress.seconds
    per_step, device = config.batch * config.context, next(model.parameters()).device
    model.train()
    while (share := progress.share(config)) < 1 and not stopping():
        began = time.monotonic()
        redraw_features(model, progress.step)
        loss = _step(model, optimizer, [part.to(device) for part in batches(progress.step)], learning_rate(share, config), clip=config.clip)
        progress.pending.append(loss)
        progress.step += 1
        progress.seconds += time.monotonic() - began
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {progress.step} is {loss}; lower learning_rate={config.learning_rate} and begin anew")
        if progress.step % LOSS_STEPS == 0:
            progress.losses.append(_point(progress, config, _mean(progress.pending) / math.log(2) / tokens.bytes_per_token))
            progress.pending.clear()
        if progress.share(config) * config.evaluations >= len(progress.evaluations) + 1:
            bits = evaluate(model, sample, end_of_text=tokens.end_of_text).overall
            progress.evaluations.append(_point(progress, config, bits))
            on_evaluation(progress)
        if progress.step % config.checkpoint_steps == 0:
            checkpoints.save(folder, progress.step, model, optimizer, asdict(progress))
        show(_moment(progress, config, tokens, resumed_at, per_step))
    checkpoints.save(folder, progress.step, model, optimizer, asdict(progress))
    return progress


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor], rate: float, *, clip: float) -> float:
    """One update; the loss in nats a token. On a GPU products are taken in bfloat16, and the weights stay in float32."""
    tokens, targets = batch
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits, _ = model(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    (loss + commitment_loss(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    update_codebooks(model)
    return loss.item()


def _point(progress: Progress, config: TrainingConfig, bits_per_byte: float) -> Point:
    return Point(progress.step, progress.step * config.batch * config.context, progress.seconds / 60, bits_per_byte)


def _moment(progress: Progress, config: TrainingConfig, tokens: Tokens, resumed_at: tuple[int, float], per_step: int) -> Moment:
    share, bits = progress.share(config), progress.losses[-1].bits_per_byte if progress.losses else None
    return Moment(
        step=progress.step,
        share=share,
        loss=None if bits is None else bits * math.log(2) * tokens.bytes_per_token,
        bits_per_byte=bits,
        held_out=progress.evaluations[-1].bits_per_byte if progress.evaluations else None,
        tokens_per_s=(progress.step - resumed_at[0]) * per_step / max(progress.seconds - resumed_at[1], 1e-9),
        left_s=progress.seconds * (1 - share) / share,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM become an answer to "stopping?"; a second signal does what it does elsewhere."""
    received: list[int] = []
    earlier = {}

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        for known, handler in earlier.items():
            signal.signal(known, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        earlier[number] = signal.signal(number, on_signal)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
