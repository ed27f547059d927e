"""Attention transfer as a task of the trainer: python -m models.distillation.decoder.task --teacher GGUF --data out/text --out OUT

The same command resumes a run. Besides what every task writes (see models/training/run.py), its output folder has:
OUT/
  delta.safetensors, delta.json   the student, see delta.py
  curve.png        curves, redrawn at every evaluation
  sources.json     every package of the training text, with its licence and size
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn
from torch.optim import AdamW

from models.attention.linear.causal_hybrid import CausalHybridAttention
from models.decoder.window import hybrid
from models.distillation.decoder.config import TransferConfig
from models.distillation.decoder.delta import description, map_names, write_delta
from models.distillation.decoder.sequences import sequences
from models.distillation.decoder.teacher import load_teacher
from models.distillation.decoder.transfer import Seen, record, recording, transfer_error
from models.distillation.plot import CURVE
from models.folders.folder import in_sentences
from models.training.config import Budget
from models.training.corpus import SOURCES
from models.training.run import run_task
from models.training.task import Loss, Progress, Report, Task
from models.training.trainer import TrainingError


class TransferTask(Task):
    """Trains the feature maps of the student; no other weight changes.

    Raises CheckpointError if the teacher cannot be used, CorpusError if the data has too few long documents.
    """

    loss_steps = 4
    evaluates_untrained = True

    def __init__(self, teacher: Path, data: Path, config: TransferConfig, name: str) -> None:
        self.config, self.name, self.data = config, name, data
        self.budget = Budget(
            max_steps=config.steps,
            max_minutes=config.minutes or None,
            evaluations=config.evaluations,
            checkpoint_steps=config.checkpoint_steps,
            clip=config.clip,
        )
        self.source, tokenizer = load_teacher(teacher)
        self.teacher_name = teacher.name
        student = hybrid(self.source.model, config.window, config.options)
        self.maps = {key: parameter for key, parameter in student.named_parameters() if key in set(map_names(student))}
        self.teacher, self.recorders = recording(student)
        self.model = nn.ModuleList(nn.ModuleList([layer.phi_q, layer.phi_k]) for layer in self.layers)
        self.optimizer = AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.texts = sequences(data, "train", tokenizer, context=config.context, n=config.texts)
        self.held_out = sequences(data, "held_out", tokenizer, context=config.context, n=config.held_out)
        self._read: tuple[int, list[Seen]] | None = None

    @property
    def layers(self) -> list[CausalHybridAttention]:
        return [recorder.layer for recorder in self.recorders]

    def learning_rates(self, step: int, share: float) -> tuple[float]:
        return (self.config.rate_at(share),)

    def loss(self, step: int) -> Loss:
        """Return the mean over layers of the squared error of their outputs, divided by that of outputs 0, for a part of a text."""
        part, seen = self.config.part(step), self._seen(step // self.config.parts)
        errors = [
            transfer_error(layer, one, part).sum() / one.o[:, :, part].square().sum() for layer, one in zip(self.layers, seen, strict=True)
        ]
        loss = torch.stack(errors).mean()
        return Loss(loss, loss, part.stop - part.start)

    def _seen(self, number: int) -> list[Seen]:
        """Return what the teacher computes for a training text. It is kept for the steps with the same text."""
        if self._read is None or self._read[0] != number:
            self._read = None  # frees the memory of the last text first
            self._read = number, record(self.teacher, self.recorders, self.texts[number][1])
        return self._read[1]

    @cached_property
    def held_out_seen(self) -> list[list[Seen]]:
        return [record(self.teacher, self.recorders, tokens) for _, tokens in self.held_out]

    @torch.no_grad()
    def layer_errors(self) -> list[tuple[float, float]]:
        """Return the relative squared errors on held-out text of every layer's outputs, and of those of its window alone."""
        parts = [self.config.part(step) for step in range(self.config.parts)]
        far = slice(self.config.window, self.config.context)
        found = []
        for number, layer in enumerate(self.layers):
            texts = [seen[number] for seen in self.held_out_seen]
            power = sum(float(one.o[:, :, far].square().sum()) for one in texts)
            ours = sum(float(transfer_error(layer, one, part).sum()) for one in texts for part in parts)
            found.append((ours / power, sum(float(one.window_error[far].sum()) for one in texts) / power))
        return found

    def evaluate(self) -> dict[str, float]:
        ours, window = zip(*self.layer_errors(), strict=True)
        return {"error": sum(ours) / len(ours), "window_error": sum(window) / len(window)}

    def describe(self, progress: Progress) -> list[str]:
        words = [f"error {point['loss']:.4f}" for point in progress.losses[-1:]]
        return words + [f"held-out {point['error']:.4f}, window alone {point['window_error']:.4f}" for point in progress.evaluations[-1:]]

    def facts(self) -> Report:
        return {
            "teacher_name": self.teacher_name,
            "config": asdict(self.config),
            "data": {
                "texts": [f"{document.package}/{document.file}" for document, _ in self.texts],
                "held_out": [f"{document.package}/{document.file}" for document, _ in self.held_out],
            },
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }

    def plot(self, report: Report, out: Path) -> None:
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(
            [point["step"] for point in report["losses"]], [point["loss"] for point in report["losses"]], lw=1.0, label="training text"
        )
        steps = [point["step"] for point in report["evaluations"]]
        for name, label in (("error", "held-out text"), ("window_error", "held-out text, window alone")):
            axes.plot(steps, [point[name] for point in report["evaluations"]], marker="o", ms=3.5, label=label)
        axes.set(xlabel="step", ylabel="relative squared error of a layer's outputs", title=self.name)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        figure.savefig(out / CURVE, dpi=130, format="png")

    def finish(self, out: Path, report: Report) -> str:
        described = description(self.source, self.teacher_name, window=self.config.window, options=self.config.options)
        report["delta_bytes"] = write_delta(out, described, self.maps)
        report["layers"] = self.layer_errors()
        (out / SOURCES).write_text((self.data / SOURCES).read_text())
        ours, window = (sum(column) / len(column) for column in zip(*report["layers"], strict=True))
        return f"error of a layer on held-out text {ours:.4f}, of its window alone {window:.4f}"


def train_maps(teacher: Path, data: Path, out: Path, config: TransferConfig, console: Console) -> bool:
    """Train, or resume the run in `out`. Returns True if the result was written, False if a signal stopped the run.

    Raises CheckpointError if the teacher cannot be used, CorpusError if the data cannot be used, ResumeError if `out` has a run with
    another config, and TrainingError for every other failure.
    """
    with in_sentences(f"attention transfer from {teacher} into {out} failed", TrainingError):
        return run_task(TransferTask(teacher, data, config, out.resolve().name), out, console)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.distillation.decoder.task", description="Train the feature maps of a decoder.")
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file of a decoder with softmax attention")
    parser.add_argument("--data", type=Path, required=True, help="folder that `python -m models.training.collect` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an unfinished run there is resumed")
    for field in fields(TransferConfig):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    teacher, data, out = (given.pop(name) for name in ("teacher", "data", "out"))
    raise SystemExit(0 if train_maps(teacher, data, out, TransferConfig(**given), Console()) else 130)


if __name__ == "__main__":
    main()
