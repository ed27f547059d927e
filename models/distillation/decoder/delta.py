"""Saves a student as its feature maps alone: all other weights are its teacher's.

    FOLDER/delta.safetensors   the maps, in float16
    FOLDER/delta.json          the teacher's fingerprint, the window and the layer's options

`python -m models.distillation.decoder.delta --teacher T --delta FOLDER --out OUT` writes an ordinary checkpoint.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.decoder import DecoderCheckpoint, save_decoder
from models.decoder.model import Decoder
from models.decoder.window import hybrid
from models.distillation.decoder.config import TransferConfig
from models.distillation.decoder.teacher import load_teacher
from models.distillation.delta import DESCRIPTION, WEIGHTS, fingerprint_of, read_description
from models.folders.folder import CheckpointError


def map_names(student: Decoder) -> list[str]:
    """Return the names of the parameters that only the student has."""
    return [name for name, _ in student.named_parameters() if ".phi_q." in name or ".phi_k." in name]


def write_delta(folder: Path, teacher: DecoderCheckpoint, name: str, maps: Mapping[str, torch.Tensor], config: TransferConfig) -> int:
    """Write delta.safetensors and delta.json, and return their total size in bytes. maps: the student's parameters by `map_names`."""
    save_file({key: tensor.detach().half().contiguous() for key, tensor in maps.items()}, folder / WEIGHTS)
    described = {"teacher": name, "teacher_sha256": fingerprint_of(teacher.model), "window": config.window, "options": config.options}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n")
    return sum((folder / file).stat().st_size for file in (WEIGHTS, DESCRIPTION))


def read_student(folder: Path, teacher: DecoderCheckpoint) -> Decoder:
    """Rebuild the student. Its other weights are those of `teacher`, shared.

    Raises CheckpointError if `teacher` is not the teacher of the difference, or if the files are missing or inconsistent.
    """
    written_by = "python -m models.distillation.decoder.task"
    described = read_description(folder, fingerprint_of(teacher.model), teacher.folder, written_by=written_by)
    student = hybrid(teacher.model, described["window"], described["options"])
    delta, places = load_file(folder / WEIGHTS), dict(student.named_parameters())
    if odd := sorted(set(map_names(student)) ^ delta.keys()):
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {odd[0]} is missing or unexpected; copy both again")
    with torch.no_grad():
        for name, tensor in delta.items():
            if tensor.shape != places[name].shape:
                raise CheckpointError(f"{folder / WEIGHTS}: {name} has shape {tuple(tensor.shape)} instead of {tuple(places[name].shape)}")
            places[name].copy_(tensor.float())
    return student


def assemble(teacher_path: Path, folder: Path, out: Path) -> None:
    """Write the student as an ordinary checkpoint. Raises CheckpointError if the difference does not fit the teacher."""
    teacher, tokenizer = load_teacher(teacher_path)
    ends = {"eos_token_ids": teacher.eos_token_ids, "bos_token_id": teacher.bos_token_id}
    student = read_student(folder, teacher)
    save_decoder(out, student, tokenizer=tokenizer.to_str(), chat_template=teacher.chat_template, **ends)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.distillation.decoder.delta", description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--delta", type=Path, required=True, help="folder with the difference")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    options = parser.parse_args(arguments)
    assemble(options.teacher, options.delta, options.out)


if __name__ == "__main__":
    main()
