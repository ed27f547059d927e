"""Compare feature maps and block sizes: python -m models.distillation.trials --teacher T --data data/distillation --out out/trials

Every candidate is trained by attention transfer only (see objectives.py), on the same batches in the same order. All candidates are
trained together, so that the teacher processes each batch once. Then each candidate is compared with the teacher, separately for
each range of text lengths, and a table is written.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from torch.optim import AdamW

from models.checkpoints.published import load_checkpoint
from models.distillation.batches import TextBatches, read_pieces, tokenize
from models.distillation.config import DistillationConfig
from models.distillation.evaluation import by_length, embed
from models.distillation.objectives import Embedder, layer_losses, teachers_layers
from models.distillation.student import new_parameters, reading, with_attention
from models.training.trainer import update

CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "linear, elu": {"block": 0, "feature_map": "elu"},
    "linear, Hedgehog": {"block": 0, "feature_map": "hedgehog"},
    "linear, Taylor": {"block": 0, "feature_map": "taylor"},
    "linear, positive": {"block": 0, "feature_map": "positive"},
    "hybrid 64, elu": {"block": 64, "feature_map": "elu"},
    "hybrid 64, Hedgehog": {"block": 64, "feature_map": "hedgehog"},
    "hybrid 64, Taylor": {"block": 64, "feature_map": "taylor"},
    "hybrid 16, positive": {"block": 16, "feature_map": "positive"},
    "hybrid 32, positive": {"block": 32, "feature_map": "positive"},
    "hybrid 64, positive": {"block": 64, "feature_map": "positive"},
}
TEXTS = 24  # number of held-out texts for each range of lengths


class Trial(NamedTuple):
    student: Embedder
    optimizer: AdamW


def run(
    teacher_folder: Path, data: Path, config: DistillationConfig, names: Sequence[str], show: Callable[[float], None]
) -> dict[str, dict[str, Any]]:
    """Train the candidates. Return for each name its options, number of new parameters, mean loss over the last 10 steps, and likeness to
    the teacher by text length.
    """
    source = load_checkpoint(teacher_folder)
    assert source.pooling is not None, "an encoder has one"
    teacher = Embedder(reading(with_attention(source, "softmax", {}, config.n_positions)), source.pooling)
    tokenizer = Tokenizer.from_file(str(source.tokenizer_file))
    texts = tokenize(read_pieces(data, "train"), tokenizer, longest=config.longest)
    batches = TextBatches(texts, tokens=config.tokens, shortest=config.shortest, seed=config.seed)
    trials = {name: _trial(source, teacher, CANDIDATES[name], config) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(config.steps):
        batch = batches(step)
        seen = teachers_layers(teacher, batch)
        for name, (student, optimizer) in trials.items():
            loss = layer_losses(student, seen, batch[1]).mean()
            update(optimizer, student.encoder, config.rates(step)[:1], loss, clip=config.clip)
            losses[name].append(loss.item())
        show((step + 1) / config.steps)
    rows = _spread(tokenize(read_pieces(data, "held_out"), tokenizer, longest=source.config.n_positions))
    wanted, lengths = embed(teacher, rows), [len(row) for row in rows]
    return {
        name: {
            "options": dict(CANDIDATES[name]),
            "new_parameters": sum(p.numel() for group in trial.optimizer.param_groups for p in group["params"]),
            "loss": sum(losses[name][-10:]) / len(losses[name][-10:]),
            "lengths": {span: asdict(found) for span, found in by_length(embed(trial.student, rows), wanted, lengths).items()},
        }
        for name, trial in trials.items()
    }


def _trial(source: Any, teacher: Embedder, options: Mapping[str, Any], config: DistillationConfig) -> Trial:
    torch.manual_seed(config.seed)
    student = with_attention(source, "hybrid", options, config.n_positions).requires_grad_(False)
    new = set(new_parameters(student, teacher.encoder))
    parameters = [p.requires_grad_() for name, p in student.named_parameters() if name in new]
    return Trial(Embedder(student, teacher.pooling), AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0))


def _spread(rows: Sequence[list[int]]) -> list[list[int]]:
    """Return the first TEXTS rows of 65 to 128 tokens, of 129 to 256, and of 257 to 512."""
    return [row for least, most in ((65, 128), (129, 256), (257, 512)) for row in [r for r in rows if least <= len(r) <= most][:TEXTS]]


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    spans = list(next(iter(found.values()))["lengths"])
    head = ["candidate", "new parameters", "loss", *(f"cosine, {span} tokens" for span in spans), f"ranks, {spans[-1]}"]
    rows = [_row(name, one, spans) for name, one in found.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def _row(name: str, one: Mapping[str, Any], spans: Sequence[str]) -> list[str]:
    cosines = [f"{one['lengths'][span]['cosine']:.4f}" for span in spans]
    return [name, f"{one['new_parameters']:,}", f"{one['loss']:.3f}", *cosines, f"{one['lengths'][spans[-1]]['ranks']:.4f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.distillation.trials", description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--data", type=Path, required=True, help="folder that `python -m models.distillation.collect` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for trials.json and trials.md")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=1_024, help="tokens of a step (1024)")
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), metavar="NAME", help="candidates (all)")
    options = parser.parse_args(arguments)
    config = DistillationConfig(
        attention="hybrid",
        transfer_steps=options.steps,
        end_to_end_steps=0,
        tokens=options.tokens,
        shortest=129,
        longest=512,
        n_positions=512,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("trials", total=1.0)
        found = run(options.teacher, options.data, config, options.only, lambda share: bar.update(task, completed=share))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trials.json").write_text(json.dumps({"config": asdict(config), "candidates": found}, indent=1) + "\n")
    (options.out / "trials.md").write_text(table(found))
    Console().print(table(found), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
