"""The metadata and the tensors of a GGUF file, read by the package `gguf` after the header was checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from models.checkpoints.gguf.header import check_header
from models.folders.folder import CheckpointError, in_sentences, present

SUFFIX = ".gguf"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file stores it: of shape (M, K) or (K,), in blocks along K if its type has blocks."""

    name: str
    type: str  # one of `header.SUPPORTED`
    shape: tuple[int, ...]
    data: NDArray[Any]  # numbers of the file, memory-mapped: the shape above for F32 and F16, else bytes with the same number of rows

    @property
    def size(self) -> int:
        """Bytes in float32."""
        return 4 * prod(self.shape)

    def values(self) -> Tensor:
        """Return the numbers: F32, F16 and BF16 in their own dtype, all others in float32."""
        if self.type == "BF16":
            return torch.from_numpy(np.array(self.data).view(np.int16)).view(torch.bfloat16).reshape(self.shape)
        if self.type in ("F32", "F16"):
            return torch.from_numpy(np.array(self.data)).reshape(self.shape)
        return torch.from_numpy(self.weights())

    def weights(self) -> NDArray[np.float32]:
        """Return the numbers in float32."""
        return np.asarray(dequantize(self.data, GGMLQuantizationType[self.type]), np.float32).reshape(self.shape)


class GgufFile:
    """An opened file. Raises CheckpointError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        check_header(path)
        self.path = path
        with in_sentences(f"{path} cannot be read", CheckpointError):
            self._reader = _Reader(path)
            self.fields: Mapping[str, Any] = {name: field.contents() for name, field in self._reader.fields.items()}

    @cached_property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return tuple(
            StoredTensor(tensor.name, tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape))), np.asarray(tensor.data))
            for tensor in self._reader.tensors
        )

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture", str))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a field, or `default` if the file lacks it. Raises CheckpointError for a value of another type."""
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.path}: {key}={value!r:.80} should be of type {kind.__name__}; use another file")
        return value

    def need(self, key: str, kind: type) -> Any:
        if (value := self.get(key, kind)) is None:
            raise CheckpointError(f"{self.path} has no {key}; convert the model again with llama.cpp")
        return value


class _Reader(GGUFReader):  # type: ignore[misc]  # mypy does not follow the package
    def _get(self, *how: Any, **more: Any) -> Any:
        self.data: Any = np.asarray(self.data)  # a view of the mapped file; views of np.memmap itself take 5 times as long to make
        return super()._get(*how, **more)


def gguf_file(checkpoint: Path) -> Path | None:
    """Return the GGUF file that `checkpoint` is, or the only one of a folder without weights of another form. None: there is none.

    Raises CheckpointError if a folder has several.
    """
    if checkpoint.suffix == SUFFIX and not checkpoint.is_dir():
        return checkpoint
    files = sorted(checkpoint.glob(f"*{SUFFIX}")) if checkpoint.is_dir() else []
    if not files or present(checkpoint / "model.safetensors") or present(checkpoint / "model.safetensors.index.json"):
        return None
    if len(files) > 1:
        raise CheckpointError(f"{checkpoint} has {len(files)} GGUF files; give the path of one, e.g. {files[0]}")
    return files[0]
