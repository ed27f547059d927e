"""Tuning as a task of the trainer: the student's distribution of the next token gets nearer to its teacher's.

    python -m models.distillation.decoder.tuning --teacher GGUF --tokens out/tokens.npz --delta FOLDER --out OUT --device cuda

Zhang et al. 2024 (LoLCATs), arXiv:2410.10254, section 3.3, with two differences. The loss is the divergence from the teacher, not the loss
of the true next token, so that the student learns nothing of the texts but what the teacher says about them. And the feature maps are
trained further, together with low-rank changes of the projections of every layer.

The same command resumes a run. Besides what every task writes (see models/training/run.py), its output folder has:
OUT/
  delta.safetensors, delta.json   the student, see delta.py; written before every checkpoint and evaluation, at the end, and after a signal
  curve.png        curves, redrawn at every evaluation
  transfer.json    run.json of the attention transfer that made the delta
  sources.json     every package of the training text, with its licence and size
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW

from models.decoder.model import Decoder
from models.decoder.window import windowed, without_far
from models.distillation.decoder.config import TuningConfig
from models.distillation.decoder.delta import DOWN, UP, Delta, read_delta, student_of, write_delta
from models.distillation.decoder.low_rank import ChangedLinear, Factors
from models.distillation.decoder.next_token import TokenFigures, divergence, token_figures
from models.distillation.decoder.parallel import hidden_states, in_parallel
from models.distillation.decoder.teacher import load_teacher
from models.distillation.decoder.tokens import Ids, read_tokens
from models.distillation.plot import CURVE
from models.folders.folder import CheckpointError, in_sentences
from models.training.config import Budget
from models.training.corpus import SOURCES, CorpusError
from models.training.run import RUN, run_task, write_report
from models.training.task import Loss, Progress, Report, Task
from models.training.trainer import TrainingError

TRANSFER = "transfer.json"
PROJECTIONS = ("layer.to_q", "layer.to_k", "layer.to_v", "layer.to_out")
FEEDFORWARD = ("feedforward.up", "feedforward.gate", "feedforward.down")
SHORT = 2_048  # tokens of the shorter measurement: that of the bar in docs/decisions.md
WARM_UP_STEPS = 20  # at least, if the run is short
LONG_WINDOW = 1_024  # of the window to compare with


class TuningTask(Task):
    """Trains the feature maps and low-rank changes of the projections; no weight of the teacher changes.

    Raises CheckpointError if teacher or delta cannot be used, CorpusError if the tokens cannot be used, ValueError for a rank or a context
    that does not fit.
    """

    loss_steps = 10
    evaluates_untrained = True

    def __init__(self, teacher: Path, tokens: Path, delta: Path, config: TuningConfig, name: str, *, device: str = "cpu") -> None:
        self.config, self.name, self.delta_folder, self.device = config, name, delta, torch.device(device)
        self.budget = Budget(
            max_steps=config.steps or None,
            max_minutes=config.minutes or None,
            evaluations=config.evaluations,
            checkpoint_steps=config.checkpoint_steps,
            clip=config.clip,
        )
        self.source, self.tokenizer = load_teacher(teacher)
        self.teacher_name = teacher.name
        started = read_delta(delta, self.source)
        if config.long is not None:
            started = started.with_long(config.long)
        self.tokens = read_tokens(tokens, vocab_size=self.source.config.vocab_size)
        self._check_context(started)
        low_rank = {"rank": config.rank, "scale": config.scale}
        self.described = started.described | {"teacher": self.teacher_name, "low_rank": low_rank}
        self.started = started
        self._build(started)
        self.optimizer = AdamW(
            [
                {"params": [p for name, p in self.trained.items() if ".phi_" in name]},
                {"params": [p for name, p in self.trained.items() if ".phi_" not in name]},
            ],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )

    def _check_context(self, started: Delta) -> None:
        context, window = self.config.context, started.described["window"]
        if context <= window:
            raise ValueError(f"context={context} must exceed the window of {window} tokens, or no token is far")
        if context > self.tokens.context:
            raise CorpusError(f"context={context}, but the texts have {self.tokens.context} tokens; write longer ones, or lower context")
        if len(self.tokens.train) < self.config.batch:
            raise CorpusError(f"batch={self.config.batch}, but there are {len(self.tokens.train)} texts; write more, or lower batch")

    def _build(self, started: Delta) -> None:
        """Make teacher and student on the device. They share the weights that are not trained."""
        config, device = self.config, self.device
        student = student_of(started, self.delta_folder, self.source)
        base = self.source.model if device.type == "cpu" else deepcopy(self.source.model).to(device)
        on_device = started.untrained(base).to(device).requires_grad_(False)
        maps = {name: parameter for name, parameter in student.named_parameters() if name in started.maps}
        places = dict(on_device.named_parameters())
        with torch.no_grad():
            for name, parameter in maps.items():
                places[name].copy_(parameter)
        self.trained: dict[str, nn.Parameter] = {name: places[name] for name in maps}
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        parts: list[nn.Module] = [module for name, module in on_device.named_modules() if name.endswith((".phi_q", ".phi_k"))]
        torch.manual_seed(config.seed)
        for name, linear in projections(on_device, feedforward=config.feedforward).items():
            factors = Factors(linear, config.rank)
            parts.append(factors)
            self.trained |= {name + DOWN: factors.down, name + UP: factors.up}
            parent, _, own = name.rpartition(".")
            setattr(on_device.get_submodule(parent), own, ChangedLinear(linear, factors, config.scale))
        self._continue(started)
        self.model = nn.ModuleList(parts)
        self.student = in_parallel(on_device, recompute=config.recompute, fused=self.fused, compiled=config.compiled)
        self.base = base
        self.teacher = in_parallel(_shared(base)).requires_grad_(False)
        self.unembedding = base.unembedding.weight.detach()

    def _continue(self, started: Delta) -> None:
        """Begin with the changes that the delta has."""
        if not started.factors:
            return
        names = {name.removesuffix(UP) for name in self.trained if name.endswith(UP)}
        if (started.rank, started.scale) != (self.config.rank, self.config.scale) or names != started.factors.keys():
            raise CheckpointError(
                f"{self.delta_folder} changes {len(started.factors)} projections, rank {started.rank}, scale {started.scale}, not "
                f"of {len(names)}, rank={self.config.rank} and scale={self.config.scale}; give the same"
            )
        with torch.no_grad():
            for name, (down, up) in started.factors.items():
                self.trained[name + DOWN].copy_(down)
                self.trained[name + UP].copy_(up)

    def learning_rates(self, step: int, share: float) -> tuple[float, float]:
        height = min(self.config.height(share), (step + 1) / WARM_UP_STEPS)
        return self.config.map_rate * height, self.config.rate * height

    def loss(self, step: int) -> Loss:
        """Return the divergence from the teacher, in nats, of a batch of texts, and with it the loss of the true tokens if asked for."""
        tokens = self._on_device(self.tokens.train[self.rows(step)][:, : self.config.context])
        with self._autocast():
            with torch.no_grad():
                theirs = hidden_states(self.teacher, tokens)
            ours = hidden_states(self.student, tokens)
        loss, kl = divergence(ours, theirs, self.unembedding, tokens, label_share=self.config.label_share)
        return Loss(loss, kl, tokens.numel())

    def rehearse(self) -> None:
        """Compute the loss and its gradients once, without a step. A GPU loads and compiles its kernels then, outside the run's minutes."""
        self.loss(0).objective.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of the texts of a step: every text once in each epoch, in an order that depends on seed and epoch only."""
        batch, n = self.config.batch, len(self.tokens.train)
        epoch, at = divmod(step, n // batch)
        order = np.random.default_rng([self.config.seed, epoch]).permutation(n)
        return order[at * batch : (at + 1) * batch]

    @property
    def fused(self) -> torch.dtype | None:
        """The dtype of the near part of attention; None: that of the heads."""
        return torch.bfloat16 if self.config.fused and self.device.type == "cuda" else None

    def _on_device(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    # Evaluation

    @torch.no_grad()
    def _figures(self, decoder: Decoder, number: int) -> TokenFigures:
        """Return the figures of a decoder's parallel form for a held-out text."""
        tokens = self._on_device(self.tokens.held_out[number : number + 1, : self.config.context])
        with self._autocast():
            ours, theirs = hidden_states(decoder, tokens), hidden_states(self.teacher, tokens)
        return token_figures(ours, theirs, self.unembedding, tokens)

    def _measured(self, decoder: Decoder, name: str) -> dict[str, float]:
        """Return bits per byte of all held-out texts and of the Python files among them, at `SHORT` tokens and at the whole context."""
        context = self.config.context
        bits, n_bytes, kl = dict[str, float](), dict[str, int](), list[float]()
        for number, text in enumerate(self.held_out_names):
            figures = self._figures(decoder, number)
            kl.append(float(figures.kl.mean()))
            for N in {min(SHORT, context), context}:
                for kind in ("", "python_") if text.endswith(".py") else ("",):
                    key = f"{kind}{name}_bits_{N}"
                    bits[key] = bits.get(key, 0.0) + float(figures.bits[0, : N - 1].double().sum())
                    n_bytes[key] = n_bytes.get(key, 0) + self._bytes(number, N)
        return {key: bits[key] / n_bytes[key] for key in bits} | {f"{name}_kl": sum(kl) / len(kl)}

    def _bytes(self, number: int, N: int) -> int:
        ids = self.tokens.held_out[number, 1:N].tolist()
        return max(len(self.tokenizer.decode(ids, skip_special_tokens=False).encode()), 1)

    @property
    def held_out_names(self) -> tuple[str, ...]:
        return self.tokens.held_out_names[: self.config.held_out]

    @cached_property
    def compared(self) -> dict[str, float]:
        """Figures that training does not change: those of the teacher, of its windows alone and of a window of `LONG_WINDOW` tokens."""
        found = self._measured(self.teacher, "teacher")
        others = {"window": without_far(self.started.untrained(self.base).to(self.device))}
        if self.config.context > LONG_WINDOW:
            others["long_window"] = windowed(self.base, LONG_WINDOW)
        for name, decoder in others.items():
            found |= self._measured(in_parallel(decoder, fused=self.fused), name)
        return {key: value for key, value in found.items() if key != "teacher_kl"}

    def evaluate(self) -> dict[str, float]:
        return self._measured(self.student, "student") | self.compared

    def describe(self, progress: Progress) -> list[str]:
        words = [f"KL {point['loss']:.4f}" for point in progress.losses[-1:]]
        for point in progress.evaluations[-1:]:
            N = min(SHORT, self.config.context)
            named = {name: point.get(f"{name}_bits_{N}") for name in ("student", "window", "long_window", "teacher")}
            bits = [f"{name} {value:.4f}" for name, value in named.items() if value is not None]
            words.append(
                f"held-out KL {point['student_kl']:.4f} (its windows alone {point['window_kl']:.4f}), bits per byte {', '.join(bits)}"
            )
        return words

    # Results

    def facts(self) -> Report:
        return {
            "teacher_name": self.teacher_name,
            "config": asdict(self.config) | self._long(),
            "data": {"sha256": self.tokens.sha256, "texts": len(self.tokens.train), "held_out": list(self.held_out_names)},
            "device": self.device.type,
            "window": self.described["window"],
            "options": self.described["options"],
            "long": self.described.get("long"),
            "parameters": sum(parameter.numel() for name, parameter in self.trained.items() if ".phi_" in name),
            "changed_parameters": sum(parameter.numel() for name, parameter in self.trained.items() if ".phi_" not in name),
        }

    def _long(self) -> Report:
        """Return the two options of the config, where the delta had the layers too."""
        if (long := self.started.long) is None:
            return {}
        return {"long_layers": ",".join(map(str, long.layers)), "long_window": long.window}

    def keep(self, out: Path) -> None:
        """Write the student as it is."""
        write_delta(out, self.described, self.trained)

    def plot(self, report: Report, out: Path) -> None:
        plot(report, out / CURVE, title=self.name)

    def finish(self, out: Path, report: Report) -> str:
        report["delta_bytes"] = write_delta(out, self.described, self.trained)
        read = {int(row) for step in range(report["step"]) for row in self.rows(step)}
        report["texts_read"] = len(read)
        report["packages_read"] = sorted({self.tokens.names[row].partition("/")[0] for row in read})
        (out / SOURCES).write_text(json.dumps(self.tokens.sources, indent=1) + "\n")
        for name in (TRANSFER, RUN):  # of the attention transfer, also where the delta was tuned before
            if (self.delta_folder / name).is_file():
                (out / TRANSFER).write_text((self.delta_folder / name).read_text())
                break
        if (run := self.delta_folder / RUN).is_file() and "changed_parameters" in (before := json.loads(run.read_text())):
            told = {key: before.get(key) for key in ("step", "tokens", "seconds", "hardware", "date")}
            report["tuned_before"] = [*before.get("tuned_before", []), told]
        if self.device.type == "cuda":
            report["memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
        first, last, N = report["evaluations"][0], report["evaluations"][-1], min(SHORT, self.config.context)
        return (
            f"held-out KL {first['student_kl']:.4f} -> {last['student_kl']:.4f}, bits per byte of {N:,} tokens "
            f"{first[f'student_bits_{N}']:.4f} -> {last[f'student_bits_{N}']:.4f}, of the teacher {last[f'teacher_bits_{N}']:.4f}"
        )


def projections(decoder: Decoder, *, feedforward: bool) -> dict[str, nn.Linear]:
    """Return the projections that a tuning changes, by name: those of every attention layer and, if asked for, feed-forward layer."""
    names = PROJECTIONS + (FEEDFORWARD if feedforward else ())
    modules = dict(decoder.named_modules())
    found = {f"blocks.{number}.{name}": modules.get(f"blocks.{number}.{name}") for number in range(len(decoder.blocks)) for name in names}
    return {name: module for name, module in found.items() if isinstance(module, nn.Linear)}


def _shared(decoder: Decoder) -> Decoder:
    """Return another decoder with the same weights, in the same memory."""
    with torch.device("meta"):
        model = Decoder(decoder.config)
    model.load_state_dict(decoder.state_dict(), assign=True)
    return model.train(decoder.training)


def plot(report: Report, file: Path, *, title: str) -> None:
    """Draw the divergence on training texts and, at `SHORT` tokens and the whole context, bits per byte of held-out texts."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    divergences, bits = figure.subplots(1, 2)
    losses, evaluations = report["losses"], report["evaluations"]
    divergences.plot([point["step"] for point in losses], [point["loss"] for point in losses], lw=1.0, label="training text")
    steps, context = [point["step"] for point in evaluations], report["config"]["context"]
    for name, label in (("student_kl", "held-out text"), ("window_kl", "held-out text, its windows alone")):
        divergences.plot(steps, [point[name] for point in evaluations], marker="o", ms=3.5, label=label)
    divergences.set(xlabel="step", ylabel="KL(teacher || student) in nats a token", yscale="log")
    for name, label in (
        ("student", "this model"),
        ("window", "its windows alone"),
        ("long_window", "window of 1,024"),
        ("teacher", "teacher"),
    ):
        for N, style in ((min(SHORT, context), "-"), (context, ":")):
            if (key := f"{name}_bits_{N}") in evaluations[0]:
                bits.plot(steps, [point[key] for point in evaluations], style, marker="o", ms=3.5, label=f"{label}, {N:,} tokens")
    bits.set(xlabel="step", ylabel="bits per byte of held-out texts")
    for axes in (divergences, bits):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=130, format="png")


def tune(teacher: Path, tokens: Path, delta: Path, out: Path, config: TuningConfig, console: Console, *, device: str = "cpu") -> bool:
    """Tune, or resume the run in `out`. Returns True if the result was written, False if a signal stopped the run; `out` has the student
    as it is then.

    Raises CheckpointError if teacher or delta cannot be used, CorpusError if the tokens cannot be used, ResumeError if `out` has a run with
    another config, and TrainingError for every other failure.
    """
    if out.resolve() == delta.resolve():
        raise TrainingError(f"{out} is also the delta to start from, which would be overwritten; choose another --out")
    with in_sentences(f"tuning {delta} into {out} failed", TrainingError):
        if device == "cuda":
            if not torch.cuda.is_available():
                raise TrainingError("--device cuda, but torch finds no GPU; use --device cpu")
            torch.set_float32_matmul_precision("high")  # TF32
        task = TuningTask(teacher, tokens, delta, config, out.resolve().name, device=device)
        if device == "cuda" or config.compiled:
            with console.status("loading and compiling kernels"):
                task.rehearse()
        ended = run_task(task, out, console)
        if not ended:  # the student is there, so its report is completed too
            report = json.loads((out / RUN).read_text())
            task.finish(out, report)
            write_report(out, report)
        return ended


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.distillation.decoder.tuning", description="Tune a student on its teacher's words."
    )
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file of a decoder with softmax attention")
    parser.add_argument("--tokens", type=Path, required=True, help="file that `python -m models.distillation.decoder.tokens` wrote")
    parser.add_argument("--delta", type=Path, required=True, help="folder of an attention transfer or of a tuning")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; an unfinished run there is resumed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(TuningConfig):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    given = vars(parser.parse_args(arguments))
    teacher, tokens, delta, out, device = (given.pop(name) for name in ("teacher", "tokens", "delta", "out", "device"))
    raise SystemExit(0 if tune(teacher, tokens, delta, out, TuningConfig(**given), Console(), device=device) else 130)


if __name__ == "__main__":
    main()
