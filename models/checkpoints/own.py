"""Writes and reads checkpoint folders in this project's own formats, as far as they are the same for all kinds of models: config.json,
tokenizer.json and the weights by parameter name.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoints.weights import check_names, copy_rows
from models.folders.folder import MOST_TOKENIZER_BYTES, WEIGHTS, CheckpointError, present, regular

CONFIG, TOKENIZER, CARD = "config.json", "tokenizer.json", "README.md"


def save_folder(folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str | None], config: Mapping[str, Any]) -> None:
    """Write `tensors`, `texts` and `config` to `folder`. The tensors keep their dtype. `texts` maps the names of further files to their
    contents. A file whose content is None is not written, and an old file of that name is deleted.

    config.json is written last, so an unfinished folder is not a valid checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    for name, text in texts.items():
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def fill_places(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy each tensor of a checkpoint into the model's tensor of the same name (`places`). Raises CheckpointError if a tensor is
    missing, unexpected or of another shape.
    """
    check_names({name: [name] for name in places}, dict(tensors), harmless=())
    for name, place in places.items():
        copy_rows(tensors[name], [place], name)


def tokenizer_file(folder: Path) -> Path:
    """Return the path of the folder's tokenizer.json. Raises CheckpointError if the file is missing."""
    if not present(folder / TOKENIZER):
        raise CheckpointError(f"{folder / TOKENIZER} is missing; copy it from where the model was saved")
    return regular(folder / TOKENIZER, most_bytes=MOST_TOKENIZER_BYTES)


def weights_sha256(folder: Path) -> str:
    """Return the sha256 of the weights file. If the folder has several weights files (shards), return the sha256 of their joined hex
    digests, in the order of the file names.
    """
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
