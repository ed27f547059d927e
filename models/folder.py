"""Reading a checkpoint folder: JSON settings and safetensors weights, and nothing that could run code (no pickle)."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
HOW_TO_CONVERT = """\
convert it yourself, where you trust its source:
    import torch, safetensors.torch as s
    s.save_file({k: v.clone() for k, v in torch.load("pytorch_model.bin").items()}, "model.safetensors")"""


class CheckpointError(ValueError):
    """A folder that cannot become a model: the message names the file, the value and the next step."""


class Settings:
    """A JSON object read key by key, so that what is missing or unsupported is an error with its name."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.values = values
        self.file = file

    def get(self, key: str, default: Any) -> Any:
        """The value, or `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise CheckpointError(f"{self.file} has no {key!r}; save the model again with save_pretrained")
        return self.values[key]

    def allow(self, key: str, *supported: Any) -> None:
        """Raise CheckpointError unless the value is one of `supported`, or absent or null."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            listed = ", ".join(repr(v) for v in supported)
            raise CheckpointError(
                f"{self.file}: {key}={value!r} is not supported (supported: {listed}); use another checkpoint",
            )

    def pick(self, key: str, default: str, choices: dict[str, str]) -> str:
        """Our name for the value. Raises CheckpointError for a value that `choices` does not have."""
        value = self.get(key, default)
        if value not in choices:
            supported = ", ".join(choices)
            raise CheckpointError(
                f"{self.file}: {key}={value!r} is not supported (supported: {supported}); use another checkpoint",
            )
        return choices[value]


def read_settings(file: Path, *, required: bool = True) -> Settings:
    """The JSON object in `file`; an empty one where it may be absent. Raises CheckpointError otherwise, and for
    broken JSON.
    """
    if not file.is_file():
        if required:
            raise CheckpointError(f"{file} is missing; save the model again with save_pretrained")
        return Settings({}, file)
    values = _read_json(file)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__} where a JSON object is expected")
    return Settings(values, file)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The pipeline of a sentence-transformers folder, in order; [] in a plain one. Raises CheckpointError for a
    malformed file.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return []
    modules = _read_json(file)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and {"type", "path"} <= m.keys() for m in modules):
        raise CheckpointError(f"{file} is not a list of objects with 'type' and 'path'")
    return modules


def subfolder(folder: Path, path: str) -> Path:
    """`folder/path`. Raises CheckpointError for a path that leaves the folder."""
    inside = (folder / path).resolve()
    if not inside.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / 'modules.json'}: path={path!r} leaves the folder")
    return inside


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards its index names.

    Raises CheckpointError when there is none, when a shard is missing, and for a folder that has only pickled weights.
    """
    if (folder / WEIGHTS).is_file():
        return _read_safetensors(folder / WEIGHTS)
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        return _read_shards(index)
    for name in PICKLES:
        if (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has only {name}, a pickle, which can run any code when read; {HOW_TO_CONVERT}",
            )
    raise CheckpointError(f"{folder / WEIGHTS} is missing; save the model again with save_pretrained")


def _read_shards(index: Path) -> dict[str, Tensor]:
    owner = read_settings(index).need("weight_map")  # tensor name -> file name
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(owner.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard {name!r}, which is not a plain file name")
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent / name}, a shard named in {WEIGHTS_INDEX}, is missing; copy it to the folder",
            )
        tensors |= _read_safetensors(index.parent / name)
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file ({error}); copy it again") from error


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON or broken UTF-8
        raise CheckpointError(f"{file} is not valid JSON ({error}); copy it again") from error
