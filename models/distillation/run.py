"""From a teacher and texts to the difference that makes a student of the teacher.

OUT/
  delta.safetensors, delta.json   models/distillation/delta.py
  README.md        the model card
  curve.png        curves, drawn anew at every look
  run.json         plan, curves, hardware, likeness to the teacher
  sources.json     every package that was read, with its licence and size
  checkpoints/     what a stopped run goes on from
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from models.checkpoints.published import Checkpoint, load_checkpoint
from models.distillation.batches import Batches, read_pieces, tokenize
from models.distillation.card import model_card
from models.distillation.delta import read_student, write_delta
from models.distillation.display import distillation_bar, plot
from models.distillation.evaluation import by_kind, by_length, embed, likeness
from models.distillation.loop import DistillationError, Progress, distil
from models.distillation.objectives import Embedder
from models.distillation.pieces import Piece
from models.distillation.plan import Plan
from models.distillation.student import new_parameters, reading, with_attention
from models.folders.folder import in_sentences, read_tokenizer
from models.training import checkpoints
from models.training.corpus import SOURCES
from models.training.loop import stop_signals
from models.training.run import hardware

RUN, CHECKPOINTS, CURVE, CARD = "run.json", "checkpoints", "curve.png", "README.md"
LOOK = 6  # every so many held-out texts for the looks on the way
BEYOND = (1_024, 2_048, 4_096, 8_192)  # tokens: what a teacher with repeated positions makes of long texts
BEYOND_TEXTS = 6
OF_A_KIND = 60  # held-out texts that the last look takes


def run(teacher_folder: Path, data: Path, out: Path, plan: Plan, console: Console) -> bool:
    """Distil, or go on with what `out` has begun. True when the result is written, False after a signal.

    Raises CheckpointError for the teacher, TextError for the data, ResumeError where `out` was begun otherwise, and DistillationError for
    everything else.
    """
    with in_sentences(f"distilling {teacher_folder} on {data} into {out} failed", DistillationError):
        return _run(teacher_folder, data, out, plan, console)


def _run(teacher_folder: Path, data: Path, out: Path, plan: Plan, console: Console) -> bool:
    source = load_checkpoint(teacher_folder)
    teacher, student = _embedders(source, plan)
    limit = source.config.n_positions
    tokenizer = read_tokenizer(source.tokenizer_file)
    batches = Batches(
        tokenize(read_pieces(data, "train"), tokenizer, longest=plan.longest), tokens=plan.tokens, shortest=plan.shortest, seed=plan.seed
    )
    pieces = _first_of_each_kind(read_pieces(data, "held_out"))
    held_out = tokenize(pieces, tokenizer, longest=limit)
    out.mkdir(parents=True, exist_ok=True)
    report = _begin(out, source, student, teacher, batches, plan)
    sample = held_out[::LOOK]
    with console.status("the teacher reads held-out text"):
        wanted = embed(teacher, sample)

    def draw(progress: Progress) -> None:
        _write(out, report | _curves(progress))
        plot(report | _curves(progress), out / CURVE, title=f"{out.resolve().name}: {plan.attention} {dict(plan.options)}")

    with distillation_bar(plan, console) as show, stop_signals() as stopping:
        progress = distil(
            teacher,
            student,
            batches,
            plan,
            out / CHECKPOINTS,
            look=lambda: likeness(embed(student, sample), wanted),
            show=show,
            on_look=draw,
            stopping=stopping,
        )
    report |= _curves(progress)
    if progress.step < plan.steps:
        console.print(f"stopped after step {progress.step:,}; the same command goes on from there")
        return False
    report["delta_bytes"] = write_delta(out, source, student.encoder, plan)
    written = Embedder(read_student(out, source), teacher.pooling)  # evaluated as written
    with console.status("reading all held-out text"):
        report["likeness"] = _last_look(teacher, written, held_out, pieces)
        report["beyond"] = _beyond(teacher, written, pieces, tokenizer, limit)
    shutil.copyfile(data / SOURCES, out / SOURCES)
    _write(out, report)
    (out / CARD).write_text(model_card(report, json.loads((data / SOURCES).read_text())), encoding="utf-8")
    found = report["likeness"]["kinds"]["all"]
    console.print(f"[green]{out}[/green]: mean cosine {found['cosine']:.4f}, rank correlation {found['ranks']:.4f} on held-out text")
    return True


def _embedders(source: Checkpoint, plan: Plan) -> tuple[Embedder, Embedder]:
    torch.manual_seed(plan.seed)
    teacher = reading(with_attention(source, "softmax", {}, plan.n_positions))
    student = with_attention(source, plan.attention, plan.options, plan.n_positions)
    assert source.pooling is not None, "an encoder has one"
    return Embedder(teacher, source.pooling), Embedder(student, source.pooling)


def _begin(out: Path, source: Checkpoint, student: Embedder, teacher: Embedder, batches: Batches, plan: Plan) -> dict[str, Any]:
    """What run.json says from the beginning. Raises ResumeError where it says otherwise already."""
    new = set(new_parameters(student.encoder, teacher.encoder))
    report = {
        "name": out.resolve().name,
        "teacher_name": _name(source.folder),
        "plan": json.loads(json.dumps(asdict(plan))),
        "data": {"texts": len(batches.rows), "tokens": sum(map(len, batches.rows)), "batches": len(batches.batches)},
        "teacher_tokens": source.config.n_positions,
        "new_parameters": sum(p.numel() for name, p in student.encoder.named_parameters() if name in new),
        "parameters": sum(p.numel() for p in student.encoder.parameters()),
        "hardware": hardware(torch.device("cpu")),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    if checkpoints.newest(out / CHECKPOINTS):
        earlier = checkpoints.read_json(out / RUN)
        for key in ("plan", "data"):
            changed = [name for name, value in report[key].items() if earlier[key].get(name) != value]
            if changed:
                raise checkpoints.ResumeError(f"{out} was begun with another {key}: {', '.join(changed)}; take another --out")
        return earlier
    _write(out, report | _curves(Progress()))
    return report


def _first_of_each_kind(pieces: Sequence[Piece]) -> list[Piece]:
    """At most OF_A_KIND; they lie in the order of a hash."""
    numbers: Counter[str] = Counter()
    kept = []
    for piece in pieces:
        numbers[piece.kind] += 1
        if numbers[piece.kind] <= OF_A_KIND:
            kept.append(piece)
    return kept


def _name(folder: Path) -> str:
    """Of the checkpoint: what a folder called `model` is in says more than its own name."""
    found = folder.resolve()
    return found.parent.name if found.name == "model" else found.name


def _last_look(teacher: Embedder, student: Embedder, rows: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> dict[str, Any]:
    ours, wanted = embed(student, rows), embed(teacher, rows)
    return {
        "kinds": {name: asdict(found) for name, found in by_kind(ours, wanted, [piece.kind for piece in pieces]).items()},
        "lengths": {name: asdict(found) for name, found in by_length(ours, wanted, [len(row) for row in rows]).items()},
    }


def _beyond(teacher: Embedder, student: Embedder, pieces: Sequence[Piece], tokenizer: Tokenizer, limit: int) -> dict[str, dict[str, Any]]:
    """Texts of N tokens: the student beside the teacher with repeated positions, and beside the mean of the teacher's embeddings of pieces
    of its own limit.
    """
    found = {}
    for N in BEYOND:
        rows = texts_of(N, tokenize([piece for piece in pieces if piece.kind == "long"], tokenizer, longest=N))[:BEYOND_TEXTS]
        if not rows or student.encoder.config.n_positions < N:
            continue
        ours, wanted = embed(student, rows), embed(teacher, rows)
        cut = torch.stack([_mean_of_pieces(teacher, row, limit) for row in rows])
        found[str(N)] = {
            "teacher": asdict(likeness(ours, wanted)),
            "pieces": asdict(likeness(ours, cut)),
            "teacher_to_pieces": asdict(likeness(wanted, cut)),
        }
    return found


def texts_of(N: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids with a first and a last special one -> the same of N tokens each: shorter texts are joined, and no text is in two."""
    made, inner = [], list[int]()
    for row in rows:
        inner += row[1:-1]
        if len(inner) >= N - 2:
            made.append([row[0], *inner[: N - 2], row[-1]])
            inner = []
    return made


def _mean_of_pieces(teacher: Embedder, row: Sequence[int], limit: int) -> torch.Tensor:
    """A text cut into pieces of at most `limit` tokens, each with its own first and last special token."""
    first, last, inner = row[0], row[-1], row[1:-1]
    starts = range(0, len(inner), limit - 2)
    pieces = [[first, *inner[start : start + limit - 2], last] for start in starts]
    return torch.nn.functional.normalize(embed(teacher, pieces).mean(0), dim=0)


def _curves(progress: Progress) -> dict[str, Any]:
    return {key: getattr(progress, key) for key in ("step", "tokens", "seconds", "losses", "looks")}


def _write(out: Path, report: dict[str, Any]) -> None:
    """run.json, whole or as it was."""
    unfinished = out / f"{RUN}.unfinished"
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(unfinished, out / RUN)
