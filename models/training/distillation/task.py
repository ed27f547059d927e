"""The distillation as a task of the trainer: a student learns to return the same embeddings as its teacher.

Besides what every task writes (see models/training/run.py), its output folder has:
OUT/
  delta.safetensors, delta.json   the student, see models/training/distillation/delta.py
  curve.png        curves, redrawn at every evaluation
  sources.json     every package of the training text, with its licence and size
"""

import json
from collections import Counter
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.optim import AdamW

from models.checkpoints.own import CARD
from models.checkpoints.published import load_checkpoint
from models.folders.folder import in_sentences, read_tokenizer
from models.training.cards import MB, Card, collected, render, table
from models.training.config import Budget
from models.training.corpus import SOURCES
from models.training.curves import Curve, Panel, draw
from models.training.distillation.batches import TextBatches, tokenize
from models.training.distillation.config import DistillationConfig
from models.training.distillation.delta import SOFTMAX_TOKENS, read_student, write_delta
from models.training.distillation.evaluation import beyond, by_kind, embed, likeness
from models.training.distillation.objectives import Embedder, end_to_end_loss, transfer_loss
from models.training.distillation.pieces import cut
from models.training.distillation.student import new_parameters, reading, with_attention
from models.training.run import run_task
from models.training.task import Loss, Progress, Report, Task
from models.training.trainer import TrainingError

SAMPLE = 6  # evaluations during the run read every sixth held-out text
PER_KIND = 60  # maximum number of held-out texts of each kind


class DistillationTask(Task):
    """Trains the blocks of the student. Its token and position embeddings remain those of the teacher.

    Raises CheckpointError if the teacher cannot be used or the attention does not fit it, TextError if the data cannot be used.
    """

    loss_steps = 5
    evaluates_untrained = True

    def __init__(self, teacher_folder: Path, data: Path, config: DistillationConfig, name: str) -> None:
        self.source, self.config, self.name, self.data = load_checkpoint(teacher_folder), config, name, data
        self.budget = Budget(
            max_steps=config.steps, evaluations=config.evaluations, checkpoint_steps=config.checkpoint_steps, clip=config.clip
        )
        assert self.source.pooling is not None, "an encoder has one"
        torch.manual_seed(config.seed)
        self.teacher = Embedder(reading(with_attention(self.source, "softmax", {}, config.n_positions)), self.source.pooling)
        self.student = Embedder(with_attention(self.source, config.attention, config.options, config.n_positions), self.source.pooling)
        self.model = self.student.encoder.blocks
        self.new = set(new_parameters(self.student.encoder, self.teacher.encoder))
        self.optimizer = self._optimizer()
        self.tokenizer = read_tokenizer(self.source.tokenizer_file)
        cut_pieces = cut(data, per_kind={"train": config.per_kind, "held_out": PER_KIND})
        self.kinds = Counter(piece.kind for piece in cut_pieces["train"])
        texts = tokenize(cut_pieces["train"], self.tokenizer, longest=config.longest)
        self.batches = TextBatches(texts, tokens=config.tokens, shortest=config.shortest, seed=config.seed)
        self.pieces = cut_pieces["held_out"]
        self.held_out = tokenize(self.pieces, self.tokenizer, longest=self.source.config.n_positions)
        self.sample = self.held_out[::SAMPLE]

    def _optimizer(self) -> AdamW:
        """Return the optimizer. It has two groups with separate learning rates: new parameters, and the blocks' other parameters."""
        named = dict(self.student.encoder.named_parameters())
        new = [parameter for name, parameter in named.items() if name in self.new]
        old = [parameter for name, parameter in named.items() if name not in self.new and "blocks." in name]
        return AdamW([{"params": new}, {"params": old}], lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)

    @cached_property
    def teachers_sample(self) -> Tensor:
        return embed(self.teacher, self.sample)

    def learning_rates(self, step: int, share: float) -> tuple[float, float]:
        return self.config.rates(step)

    def loss(self, step: int) -> Loss:
        """Return the loss of the step's batch. Parameters with learning rate 0 get no gradient."""
        self.student.encoder.requires_grad_(False)
        for group, rate in zip(self.optimizer.param_groups, self.config.rates(step), strict=True):
            for parameter in group["params"]:
                parameter.requires_grad_(rate > 0)
        batch = self.batches(step)
        if self.config.phase(step) == "transfer":
            loss = transfer_loss(self.teacher, self.student, batch)
        else:
            loss = end_to_end_loss(self.teacher, self.student, batch, self.config)
        return Loss(loss, loss, int(batch[1].sum()))

    def evaluate(self) -> dict[str, float]:
        found = likeness(embed(self.student, self.sample), self.teachers_sample)
        return {"cosine": found.cosine, "ranks": found.ranks}

    def describe(self, progress: Progress) -> list[str]:
        words = [self.config.phase(progress.step - 1), *(f"loss {point['loss']:.4f}" for point in progress.losses[-1:])]
        return words + [f"held-out cosine {point['cosine']:.4f}, ranks {point['ranks']:.4f}" for point in progress.evaluations[-1:]]

    def facts(self) -> Report:
        batches, named = self.batches, dict(self.student.encoder.named_parameters())
        return {
            "teacher_name": _name(self.source.folder),
            "config": self.config.model_dump(mode="json"),
            "data": {"texts": len(batches.rows), "tokens": sum(map(len, batches.rows)), "batches": len(batches.batches)},
            "teacher_tokens": self.source.config.n_positions,
            "new_parameters": sum(parameter.numel() for name, parameter in named.items() if name in self.new),
            "parameters": sum(parameter.numel() for parameter in named.values()),
        }

    def plot(self, report: Report, out: Path) -> None:
        losses, evaluations = report["losses"], report["evaluations"]
        transfer = [point for point in losses if point["step"] <= self.config.transfer_steps]
        loss = [
            Curve("transfer", transfer, lambda point: point["loss"], dots=False),
            Curve("end to end", losses[len(transfer) :], lambda point: point["loss"], colour=1, dots=False),
        ]
        likeness = [
            Curve("mean cosine to the teacher", evaluations, lambda point: 1 - point["cosine"]),
            Curve("rank correlation of pair similarities", evaluations, lambda point: 1 - point["ranks"], colour=1),
        ]
        panels = [Panel("step", "loss of training text", loss), Panel("step", "held-out text: 1 - likeness", likeness)]
        draw(panels, out / "curve.png", title=f"{self.name}: {self.config.attention} {self.config.options}")

    def finish(self, out: Path, report: Report) -> str:
        report["delta_bytes"] = write_delta(out, self.source, self.student.encoder, self.config)
        written = Embedder(read_student(out, self.source), self.teacher.pooling)
        ours, teachers = embed(written, self.held_out), embed(self.teacher, self.held_out)
        kinds = by_kind(ours, teachers, [piece.kind for piece in self.pieces])
        long = [piece for piece in self.pieces if piece.kind == "long"]
        further = beyond(self.teacher, written, lambda N: tokenize(long, self.tokenizer, longest=N))
        report["likeness"] = {"kinds": {name: asdict(found) for name, found in kinds.items()}}
        report["beyond"] = {N: asdict(found) for N, found in further.items()}
        sources = json.loads((self.data / SOURCES).read_text()) | {"kinds": {"train": self.kinds}}
        (out / SOURCES).write_text(json.dumps(sources, indent=1) + "\n")
        (out / CARD).write_text(render(_card(report, sources), report), encoding="utf-8")
        found = kinds["all"]
        return f"mean cosine {found.cosine:.4f}, rank correlation {found.ranks:.4f} on held-out text"


def _card(report: Report, sources: Report) -> Card:
    config, name, limit = report["config"], report["name"], report["teacher_tokens"]
    changed = "changes of the blocks' weights too" if config["end_rate"] > 0 else "nothing of the teacher is changed"
    served = f" A bundle in fp32 computes texts of up to {min(SOFTMAX_TOKENS, limit):,} tokens with the teacher's softmax attention."

    def likenesses(of: str, found: Report) -> str:
        rows = [(key, str(one["texts"]), *(f"{one[figure]:.4f}" for figure in ("cosine", "lowest", "ranks"))) for key, one in found.items()]
        return table((of, "texts", "mean cosine", "lowest", "rank correlation"), rows)

    return Card(
        tags=["sentence-similarity", "distillation", "linear-attention"],
        about=f"""{report["teacher_name"]} with another attention: `{config["attention"]}` in every block,
and {config["n_positions"]:,} positions where the teacher has {limit:,}; those beyond are the teacher's again from the
beginning, t mod {limit}. Its cost grows with the length of a text, not with its square. This folder holds the difference to the teacher,
{report["delta_bytes"] / MB:.1f} MB: {report["new_parameters"]:,} new parameters; {changed}.
The teacher's weights come from where they are published.""",
        before=[f"python -m models.training assemble --teacher TEACHER --delta THIS_FOLDER --out out/{name}"],
        checkpoint=f"out/{name}",
        figures=[
            f"""## Likeness to the teacher

Held-out texts, cut at the teacher's {limit:,} tokens. *Cosine*: of the two embeddings of a text. *Rank correlation*: Spearman's, of the
similarities of all pairs of the texts.{served if config["end_rate"] == 0 else ""}

{likenesses("kind", report["likeness"]["kinds"])}

![Loss and likeness against steps](curve.png)""",
            f"""## Beyond {limit:,} tokens

There the student is compared with the teacher's softmax attention with the same repeated positions. Texts that are too short are joined.

{likenesses("tokens", report["beyond"])}""",
        ],
        data=collected(sources),
        limits=[
            "It imitates its teacher, faults included, and is made for English: of other scripts it mostly reads single letters.",
            f"Most of its training text is code and its documentation, in texts of up to {config['longest']:,} tokens.",
        ],
    )


def distill(teacher_folder: Path, data: Path, out: Path, config: DistillationConfig, console: Console) -> bool:
    """Distil, or resume the run in `out`. Returns True if the result was written, False if a signal stopped the run.

    Raises CheckpointError if the teacher cannot be used, TextError if the data cannot be used, ResumeError if `out` has a run with
    another config, and TrainingError for every other failure.
    """
    with in_sentences(f"distilling {teacher_folder} on {data} into {out} failed", TrainingError):
        return run_task(DistillationTask(teacher_folder, data, config, out.resolve().name), out, console)


def _name(folder: Path) -> str:
    """Return the folder's name, or its parent's name if the folder is called `model`."""
    found = folder.resolve()
    return found.parent.name if found.name == "model" else found.name
