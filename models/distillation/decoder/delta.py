"""Saves a student as its difference to the teacher: feature maps and, if they were tuned, low-rank changes of projections.

    FOLDER/delta.safetensors   in float16: the maps by name, and the factors A and B of a change as PROJECTION.down and PROJECTION.up
    FOLDER/delta.json          the teacher's fingerprint, the window and the layer's options, the layers with a longer window and the scale
                               of the changes if it has any

`python -m models.distillation.decoder.delta --teacher T --delta FOLDER --out OUT` writes an ordinary checkpoint, with the changes added.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.checkpoints.decoder import DecoderCheckpoint, save_decoder
from models.decoder.model import Decoder
from models.decoder.window import LongWindow, hybrid
from models.distillation.decoder.low_rank import merged
from models.distillation.decoder.teacher import load_teacher
from models.distillation.delta import DESCRIPTION, WEIGHTS, fingerprint_of, read_description
from models.folders.folder import CheckpointError

DOWN, UP = ".down", ".up"
WRITTEN_BY = "python -m models.distillation.decoder.task"


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The content of the two files. `described` is that of delta.json."""

    described: dict[str, Any]
    maps: dict[str, Tensor]  # float32, by `map_names`
    factors: dict[str, tuple[Tensor, Tensor]]  # float32: the name of a projection, such as blocks.0.layer.to_q -> A (r, D_in), B (D_out, r)

    @property
    def scale(self) -> float:
        """The factor of every product B A."""
        return float(self.described["low_rank"]["scale"]) if self.factors else 0.0

    @property
    def long(self) -> LongWindow | None:
        """The layers with a longer window in place of maps, if there are any."""
        given = self.described.get("long")
        return None if given is None else LongWindow(tuple(given["layers"]), given["window"])

    def with_long(self, long: LongWindow) -> "Delta":
        """Return the difference without the maps of these layers, which have a longer window instead. Raises ValueError if others have no
        maps."""
        if self.long is not None and (without := sorted(set(self.long.layers) - set(long.layers))):
            raise ValueError(f"the delta has no maps for layers {without}; name them in long_layers too, or begin with another delta")
        of_long = tuple(f"blocks.{number}." for number in long.layers)
        maps = {name: tensor for name, tensor in self.maps.items() if not name.startswith(of_long)}
        return replace(self, described=self.described | {"long": long._asdict()}, maps=maps)

    def untrained(self, teacher: Decoder) -> Decoder:
        """Return the student of a teacher with new maps. All other weights are the teacher's, shared."""
        return hybrid(teacher, self.described["window"], self.described["options"], self.long)

    @property
    def rank(self) -> int:
        """r, or 0 without changes."""
        return next((down.shape[0] for down, _ in self.factors.values()), 0)


def map_names(student: Decoder) -> list[str]:
    """Return the names of the parameters that only the student has."""
    return [name for name, _ in student.named_parameters() if ".phi_q." in name or ".phi_k." in name]


def description(
    teacher: DecoderCheckpoint, name: str, *, window: int, options: Mapping[str, Any], low_rank: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of delta.json. low_rank: rank and scale of the changes, if there are any."""
    described = {"teacher": name, "teacher_sha256": fingerprint_of(teacher.model), "window": window, "options": dict(options)}
    return described | ({} if low_rank is None else {"low_rank": dict(low_rank)})


def write_delta(folder: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write delta.safetensors and delta.json, each under another name first, and return their total size in bytes.

    described: the result of `description`. tensors: the student's maps and factors by their names in the file.
    """
    kept = {key: tensor.detach().to("cpu", torch.float16).contiguous() for key, tensor in tensors.items()}
    save_file(kept, folder / f"{WEIGHTS}.unfinished")
    (folder / f"{DESCRIPTION}.unfinished").write_text(json.dumps(described, indent=1) + "\n")
    for name in (WEIGHTS, DESCRIPTION):
        (folder / f"{name}.unfinished").replace(folder / name)
    return sum((folder / file).stat().st_size for file in (WEIGHTS, DESCRIPTION))


def read_delta(folder: Path, teacher: DecoderCheckpoint) -> Delta:
    """Read the difference. Raises CheckpointError if `teacher` is not its teacher, or if the files are missing or inconsistent."""
    described = read_description(folder, fingerprint_of(teacher.model), teacher.folder, written_by=WRITTEN_BY)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    projections = {name.removesuffix(end) for name in tensors for end in (DOWN, UP) if name.endswith(end)}
    if bool(projections) != ("low_rank" in described) or (projections and "scale" not in described["low_rank"]):
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: only one of them has low-rank changes; copy both again")
    factors = {}
    for name in sorted(projections):
        if missing := sorted({name + DOWN, name + UP} - tensors.keys()):
            raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {missing[0]} is missing or unexpected; copy both again")
        factors[name] = (tensors.pop(name + DOWN), tensors.pop(name + UP))
    return Delta(described=described, maps=tensors, factors=factors)


def student_of(delta: Delta, folder: Path, teacher: DecoderCheckpoint) -> Decoder:
    """Return the student with its maps, without its changes. All other weights are those of `teacher`, shared. `folder` is for messages."""
    try:
        student = delta.untrained(teacher.model)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} does not describe a student of this teacher ({error}); copy it again") from error
    places = dict(student.named_parameters())
    if odd := sorted(set(map_names(student)) ^ delta.maps.keys()):
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {odd[0]} is missing or unexpected; copy both again")
    with torch.no_grad():
        for name, tensor in delta.maps.items():
            if tensor.shape != places[name].shape:
                raise CheckpointError(f"{folder / WEIGHTS}: {name} has shape {tuple(tensor.shape)} instead of {tuple(places[name].shape)}")
            places[name].copy_(tensor)
    return student


def read_student(folder: Path, teacher: DecoderCheckpoint) -> Decoder:
    """Rebuild the student. Projections with a low-rank change are its own, and its other weights are those of `teacher`, shared.

    Raises CheckpointError if `teacher` is not the teacher of the difference, or if the files are missing or inconsistent.
    """
    delta = read_delta(folder, teacher)
    student = student_of(delta, folder, teacher)
    modules = dict(student.named_modules())
    for name, (down, up) in delta.factors.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            raise CheckpointError(f"{folder / WEIGHTS}: {name} is not a projection of the teacher; copy it again")
        if (up.shape[0], down.shape[1]) != tuple(linear.weight.shape) or up.shape[1] != down.shape[0]:
            raise CheckpointError(
                f"{folder / WEIGHTS}: the change of {name} has the shapes {tuple(up.shape)} and {tuple(down.shape)}, which do not fit a "
                f"projection of shape {tuple(linear.weight.shape)}"
            )
        # A new parameter: the old one shares its memory with the teacher.
        linear.weight = nn.Parameter(merged(linear.weight.detach(), down.to(linear.weight), up.to(linear.weight), delta.scale))
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
