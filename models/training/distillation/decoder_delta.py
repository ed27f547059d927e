"""Rebuilds a decoder with windows and feature maps from its difference to a decoder with softmax attention (the teacher).

    FOLDER/delta.safetensors   in float16: the maps by name, and the factors A and B of a change as PROJECTION.down and PROJECTION.up
    FOLDER/delta.json          the teacher's fingerprint, the window and the layer's options, the layers with a longer window and the scale
                               of the changes if it has any

A changed projection is W + scale B A, with A (r, D_in) and B (D_out, r): Hu et al. 2021 (LoRA), arXiv:2106.09685.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.checkpoints.decoder import DecoderCheckpoint, load_decoder, save_decoder
from models.checkpoints.gguf.file import gguf_file
from models.checkpoints.gguf.unpack import unpack
from models.decoder.model import Decoder
from models.decoder.window import LongWindow, hybrid
from models.folders.folder import CheckpointError, read_tokenizer
from models.training.distillation.delta import DESCRIPTION, WEIGHTS, fingerprint_of, read_description

DOWN, UP = ".down", ".up"


def load_teacher(path: Path) -> tuple[DecoderCheckpoint, Tokenizer]:
    """Return the decoder and its tokenizer. Raises CheckpointError if `path` is neither a checkpoint folder nor a GGUF file."""
    if (gguf := gguf_file(path)) is None:
        checkpoint = load_decoder(path)
        return checkpoint, read_tokenizer(checkpoint.tokenizer_file)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / gguf.stem
        unpack(gguf, folder)
        checkpoint = load_decoder(folder)
        return checkpoint, read_tokenizer(checkpoint.tokenizer_file)


def read_student(folder: Path, teacher: DecoderCheckpoint) -> Decoder:
    """Rebuild the student. Its maps and changed projections are its own, and its other weights are those of `teacher`, shared.

    Raises CheckpointError if `teacher` is not the teacher of the difference, or if the files are missing or inconsistent.
    """
    described = read_description(folder, fingerprint_of(teacher.model), teacher.folder)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    changed = sorted({name.removesuffix(end) for name in tensors for end in (DOWN, UP) if name.endswith(end)})
    if bool(changed) != ("low_rank" in described) or (changed and "scale" not in described["low_rank"]):
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: only one of them has low-rank changes; copy both again")
    try:
        long = LongWindow(tuple(described["long"]["layers"]), described["long"]["window"]) if "long" in described else None
        student = hybrid(teacher.model, described["window"], described["options"], long)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} does not describe a student of this teacher ({error}); copy it again") from error
    places = {name: parameter for name, parameter in student.named_parameters() if ".phi_q." in name or ".phi_k." in name}
    if odd := sorted((places.keys() | {name + end for name in changed for end in (DOWN, UP)}) ^ tensors.keys()):
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {DESCRIPTION}: {odd[0]} is missing or unexpected; copy both again")
    with torch.no_grad():
        for name, place in places.items():
            if tensors[name].shape != place.shape:
                raise CheckpointError(f"{folder / WEIGHTS}: {name} has shape {tuple(tensors[name].shape)} instead of {tuple(place.shape)}")
            place.copy_(tensors[name])
    for name in changed:
        _change(student, name, tensors[name + DOWN], tensors[name + UP], float(described["low_rank"]["scale"]), folder / WEIGHTS)
    return student


def _change(student: Decoder, name: str, down: Tensor, up: Tensor, scale: float, file: Path) -> None:
    """Add scale B A to a projection: down is A, up is B. `file` is for messages."""
    linear = dict(student.named_modules()).get(name)
    if not isinstance(linear, nn.Linear):
        raise CheckpointError(f"{file}: {name} is not a projection of the teacher; copy it again")
    weight = linear.weight.detach()
    if (up.shape[0], down.shape[1]) != tuple(weight.shape) or up.shape[1] != down.shape[0]:
        raise CheckpointError(
            f"{file}: the change of {name} has the shapes {tuple(up.shape)} and {tuple(down.shape)}, which do not fit a projection of "
            f"shape {tuple(weight.shape)}"
        )
    # A new parameter: the old one shares its memory with the teacher.
    linear.weight = nn.Parameter(torch.addmm(weight, up.to(weight), down.to(weight), alpha=scale))


def assemble_decoder(teacher_path: Path, folder: Path, out: Path) -> None:
    """Write the student as an ordinary checkpoint. Raises CheckpointError if the difference does not fit the teacher."""
    teacher, tokenizer = load_teacher(teacher_path)
    student = read_student(folder, teacher)
    save_decoder(
        out,
        student,
        tokenizer=tokenizer.to_str(),
        chat_template=teacher.chat_template,
        eos_token_ids=teacher.eos_token_ids,
        bos_token_id=teacher.bos_token_id,
    )
