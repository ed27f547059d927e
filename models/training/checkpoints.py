"""Saves and loads the checkpoints of a run. A checkpoint has everything that the next step depends on, so a resumed run computes the
same bits as an uninterrupted one.

    FOLDER/step-000200/
      model.safetensors       parameters and persistent buffers by name
      optimizer.safetensors   AdamW's step and moments, as `PARAMETER/exp_avg`
      progress.json           the step, the time used, the curves so far

A checkpoint is written under another name, flushed to the disk and renamed. Then the older checkpoint is removed. Batches are not
stored, because they depend on seed and step only.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from service.errors import AttnserveError

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"


class ResumeError(AttnserveError, ValueError):
    """The checkpoint in the folder belongs to another run or is damaged. The message names the file and what is wrong."""


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """Write the checkpoint of `step` and remove all others."""
    target = folder / f"step-{step:06d}"
    unfinished = folder / f"unfinished-{step:06d}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {f"{names[p]}/{key}": tensor for p, state in optimizer.state.items() for key, tensor in state.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in _tensors(model).items()}, unfinished / MODEL)
    save_file({name: tensor.contiguous() for name, tensor in moments.items()}, unfinished / OPTIMIZER)
    (unfinished / PROGRESS).write_text(json.dumps(progress))
    for file in unfinished.iterdir():
        _flush(file)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    _flush(folder)
    for other in folder.iterdir():
        if other != target:
            shutil.rmtree(other)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from, or None. Unfinished folders of a killed run are ignored."""
    return max(folder.glob("step-*"), key=lambda checkpoint: checkpoint.name, default=None)


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Fill the model and the optimizer from the checkpoint, and return the content of its progress.json. Raises ResumeError if a file is
    missing or if the tensors are those of another model.
    """
    progress = read_json(checkpoint / PROGRESS)
    for name in (MODEL, OPTIMIZER):
        _check_file(checkpoint / name)
    tensors, parameters = load_file(checkpoint / MODEL), _tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
        raise ResumeError(f"{checkpoint / MODEL} has tensors of another model; train into another folder, or remove this one")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for name, tensor in load_file(checkpoint / OPTIMIZER).items():
        parameter = parameters[name.rpartition("/")[0]]
        optimizer.state[parameter][name.rpartition("/")[2]] = tensor.to(parameter.device)
    return progress


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ResumeError if the file is missing, broken or has another JSON value."""
    _check_file(file)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResumeError(f"{file} cannot be read ({error}); train into another folder, or remove this one") from error
    if not isinstance(values, dict):
        raise ResumeError(f"{file} has a {type(values).__name__} instead of an object; train into another folder")
    return values


def _check_file(file: Path) -> None:
    if not file.is_file():  # checked first, because opening a pipe would block
        raise ResumeError(f"{file} is missing or is not a regular file; train into another folder, or remove this one")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, each once, and the persistent buffers, some of which training changes (such as codebooks)."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that the content is on the disk before the rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
