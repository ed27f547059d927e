"""Saves a student as its difference to the teacher, which takes at most half the bytes of a checkpoint.

    FOLDER/delta.safetensors   in float16: new parameters, and the changes of those parameters that training changed
    FOLDER/delta.json          the teacher's fingerprint, the attention and its options, the number of positions

`python -m models.training assemble` adds the difference to the teacher and writes an ordinary checkpoint.

If training left the teacher's weights as they were, the checkpoint says that short texts are computed with softmax attention, by which they
get exactly the teacher's vectors. Short texts are those that fit the teacher's positions, of up to SOFTMAX_TOKENS tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoints.own_encoder import save_encoder
from models.checkpoints.published import Checkpoint, load_checkpoint
from models.encoder.model import Encoder
from models.encoder.softmax import softmax_of
from models.folders.folder import CheckpointError
from models.training.distillation.config import DistillationConfig
from models.training.distillation.student import with_attention

WEIGHTS, DESCRIPTION = "delta.safetensors", "delta.json"
SOFTMAX_TOKENS = 512  # about the length from which hybrid attention is faster than softmax attention; docs/figures.md, The linear encoder


def fingerprint(teacher: Checkpoint) -> str:
    """Return the fingerprint of the encoder."""
    return fingerprint_of(teacher.model.encoder)


def fingerprint_of(model: nn.Module) -> str:
    """Return the sha256 of the model's tensors and their names, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0" + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_delta(folder: Path, teacher: Checkpoint, student: Encoder, config: DistillationConfig) -> int:
    """Write delta.safetensors and delta.json, and return their total size in bytes."""
    known = dict(with_attention(teacher, config.attention, config.options, config.n_positions).named_parameters())
    old = dict(teacher.model.encoder.named_parameters())
    kept: dict[str, Tensor] = {}
    for name, parameter in student.named_parameters():
        if name not in old:
            kept[name] = parameter.detach().half()
        elif not torch.equal(parameter, known[name]):
            kept[name] = (parameter.detach() - known[name].detach()).half()
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / WEIGHTS)
    description = {
        "teacher": teacher.folder.resolve().name,
        "teacher_sha256": fingerprint(teacher),
        "attention": config.attention,
        "options": config.options,
        "n_positions": config.n_positions,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    return sum((folder / name).stat().st_size for name in (WEIGHTS, DESCRIPTION))


def read_description(folder: Path, found: str, teacher: Path) -> dict[str, Any]:
    """Return what delta.json says. found: the fingerprint of the model in the folder `teacher`.

    Raises CheckpointError if a file is missing, or if this is not the teacher of the difference.
    """
    for name in (WEIGHTS, DESCRIPTION):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; copy the folder again, or make it with `python -m models.training distill`")
    described: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    if found != described["teacher_sha256"]:
        raise CheckpointError(
            f"{folder} is the difference to {described['teacher']} with fingerprint {described['teacher_sha256'][:12]}, and "
            f"{teacher} has {found[:12]}; give the teacher from which it was made"
        )
    return described


def is_of_decoder(folder: Path) -> bool:
    """Return whether the difference in a folder is that of a decoder, which has a window."""
    file = folder / DESCRIPTION
    return file.is_file() and "window" in json.loads(file.read_text())


def read_student(folder: Path, teacher: Checkpoint) -> Encoder:
    """Rebuild the student from the teacher and the saved difference.

    Raises CheckpointError if `teacher` is not the teacher of the difference, or if the files are missing or inconsistent.
    """
    described = read_description(folder, fingerprint(teacher), teacher.folder)
    student = with_attention(teacher, described["attention"], described["options"], described["n_positions"])
    old = {name for name, _ in teacher.model.encoder.named_parameters()}
    places = dict(student.named_parameters())
    delta = load_file(folder / WEIGHTS)
    new = {name for name in places if name not in old}
    if not new <= delta.keys() <= places.keys():
        odd = sorted((new - delta.keys()) | (delta.keys() - places.keys()))
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {odd[0]} is missing or unexpected; copy both again")
    with torch.no_grad():
        for name, tensor in delta.items():
            if tensor.shape != places[name].shape:
                raise CheckpointError(f"{folder / WEIGHTS}: {name} has shape {tuple(tensor.shape)} instead of {tuple(places[name].shape)}")
            places[name].copy_(tensor.float() + (places[name] if name in old else 0.0))
    return student


def assemble(teacher_folder: Path, folder: Path, out: Path, *, softmax: bool = False) -> None:
    """Write the student as an ordinary checkpoint. With `softmax`, write the teacher with the student's number of positions instead.

    Raises CheckpointError if the teacher cannot be loaded, or if the difference does not fit it.
    """
    teacher = load_checkpoint(teacher_folder)
    student = read_student(folder, teacher)
    if softmax:
        student = with_attention(teacher, "softmax", {}, student.config.n_positions)
    assert teacher.pooling is not None, "an encoder has one"
    tokenizer = teacher.tokenizer_file.read_text(encoding="utf-8")
    how: dict[str, Any] = {"tokenizer": tokenizer, "pooling": teacher.pooling, "normalized": teacher.normalized}
    save_encoder(out, student, **how, softmax_tokens=None if softmax else softmax_tokens(student, teacher))


def softmax_tokens(student: Encoder, teacher: Checkpoint) -> int | None:
    """Return up to how many tokens the student's softmax form is the teacher. None if training changed the teacher's weights, because
    vectors of short texts would then be of another model than those of long texts, or if no longer text is left.
    """
    limit = min(SOFTMAX_TOKENS, teacher.config.n_positions)
    if limit >= student.config.n_positions:
        return None
    theirs = teacher.model.encoder.state_dict()
    same = (torch.equal(tensor, theirs[name][: len(tensor)]) for name, tensor in softmax_of(student, limit).state_dict().items())
    return limit if all(same) else None
