"""Reads checkpoint folders: JSON settings and safetensors weights. Pickles are not read, since they can run code."""

import functools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from models.folders.config_fields import checked
from service.errors import AttnserveError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"
HOW_TO_CONVERT = """\
convert it yourself, in that folder, where you trust its source:
    import glob, torch, safetensors.torch as s
    t = {k: v for f in glob.glob("pytorch_model*.bin") for k, v in torch.load(f, map_location="cpu", weights_only=True).items()}
    s.save_file({k: v.contiguous().clone() for k, v in t.items()}, "model.safetensors")"""

# Maximum sizes of files and tables, far above those of published models.
MOST_JSON_BYTES = 16 * 2**20
MOST_INDEX_BYTES = MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_HEADER_BYTES = 16 * 2**20  # largest header of a safetensors file
MOST_TEMPLATE_BYTES = 2**20
MOST_BUFFER_NUMBERS = 2**27  # largest total number of values in the tables (buffers) that a model computes

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
Loaded = TypeVar("Loaded")
Choice = TypeVar("Choice", bound=str)


class CheckpointError(AttnserveError, ValueError):
    """A folder cannot be loaded as a model. The message states the file, the value and the next step."""


class JsonSettings:
    """A JSON object that is read key by key, so that the error for a missing or unsupported value names its key."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.values = values
        self.file = file

    def get(self, key: str, default: Any) -> Any:
        """Return the value, or `default` if the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else self._checked(key, value)

    def need(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise CheckpointError(f"{self.file} has no {key!r}; save the model again with save_pretrained")
        return self._checked(key, value)

    def _checked(self, key: str, value: Any) -> Any:
        try:
            return checked(key, value)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {key}={value!r:.80} is not accepted ({error}); correct it") from None

    def allow(self, key: str, *supported: Any) -> None:
        """Raise CheckpointError unless the value of `key` is one of `supported`, absent or null."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            listed = ", ".join(repr(v) for v in supported)
            raise CheckpointError(f"{self.file}: {key}={value!r:.80} is not supported (supported: {listed}); use another checkpoint")

    def pick(self, key: str, default: str, choices: Mapping[str, Choice]) -> Choice:
        """Return the entry of `choices` for the value of `key`, which is `default` if the key is absent or null. Raises CheckpointError if
        `choices` has no such entry.
        """
        value = self.get(key, default)
        if value not in choices:
            supported = ", ".join(choices)
            raise CheckpointError(f"{self.file}: {key}={value!r:.80} is not supported (supported: {supported}); use another checkpoint")
        return choices[value]


def regular(file: Path, *, most_bytes: int | None = None) -> Path:
    """Return `file`. Raises CheckpointError if it is missing, too large, not a regular file, or a link to outside its folder.

    Links to `blobs` are allowed in the cache of huggingface_hub, whose snapshots/REVISION folders consist of such links.
    """
    try:
        found, folder = file.resolve(strict=True), file.parent.resolve(strict=True)
        about = found.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file} is missing; save the model again with save_pretrained") from None
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a link to itself, or a name that is too long
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from None
    blobs = next((above.parent / "blobs" for above in folder.parents if above.name == "snapshots"), None)
    if not any(found.is_relative_to(place) for place in (folder, blobs) if place is not None):
        raise CheckpointError(f"{file} is a link to a place outside its folder, which is not followed; copy the folder with its files")
    if not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"{file} is not a regular file; copy it again")
    if most_bytes is not None and about.st_size > most_bytes:
        raise CheckpointError(f"{file} has {about.st_size} bytes; the limit is {most_bytes}; copy it again")
    return file


def present(file: Path) -> bool:
    """Return True if a file or a link of this name exists, even if the link is broken. `regular` raises the error for a broken link."""
    return os.path.lexists(file)


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer. Raises CheckpointError if the file is not a valid one."""
    text = read_text(file, MOST_TOKENIZER_BYTES)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # `tokenizers` raises plain `Exception`, and Rust panics are only BaseException
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise CheckpointError(f"{file} is not a tokenizer ({in_a_line(error)}); copy it again") from error


def read_settings(file: Path, *, required: bool = True, most_bytes: int = MOST_JSON_BYTES) -> JsonSettings:
    """Read the JSON object in `file`, or return an empty one if the file is absent and not `required`. Raises CheckpointError for
    broken JSON.
    """
    if not required and not present(file):
        return JsonSettings({}, file)
    values = _read_json(file, most_bytes)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} has a {type(values).__name__} instead of a JSON object; copy it again")
    return JsonSettings(values, file)


def rehearsed(load: Callable[..., Loaded]) -> Callable[..., Loaded]:
    """A decorator for functions that load a model from a folder. It calls the function twice: first as a rehearsal, in which tensors have
    shapes but no data (torch's meta device), then to load the model.

    The rehearsal compares config.json with the headers of the weights before memory is allocated. Any error that torch raises
    because of a broken file becomes a CheckpointError with a one-line message.
    """

    @functools.wraps(load)
    def loaded(folder: Path, **how: Any) -> Loaded:
        if _rehearsing.get():
            return load(folder, **how)
        token = _rehearsing.set(True)
        try:
            with in_sentences(f"{folder} cannot be read", CheckpointError), torch.device("meta"):
                check_memory(folder, load(folder, **how).model)  # type: ignore[attr-defined]
        finally:
            _rehearsing.reset(token)
        with in_sentences(f"{folder} cannot be read", CheckpointError):
            return load(folder, **how)

    return loaded


def rehearsing() -> bool:
    """Return True during a rehearsal (see `rehearsed`), in which tensors have shapes but no data."""
    return _rehearsing.get()


@contextmanager
def in_sentences(failed: str, kind: type[Exception]) -> Iterator[None]:
    """Convert exceptions within the block to `kind` with a one-line message, except those of this project and of the operating system.

    The exceptions that libraries raise for broken or hostile files have no common base class. The message begins with `failed`; the
    original error is the cause.
    """
    try:
        yield
    except OSError:  # passed on, because its message is already one line with the file and the reason
        raise
    except RecursionError:
        raise kind(f"{failed}: it is nested too deeply; copy it again") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("models", "export"):
            raise
        raise kind(f"{failed}: {type(error).__name__}: {in_a_line(error)}") from error


@contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Convert a ValueError or TypeError within the block to a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def check_memory(what: Path, model: torch.nn.Module) -> None:
    """Raise CheckpointError if the model's parameters exceed this machine's memory, or if its buffers (such as position tables)
    are larger than any published model's. The model may be on torch's meta device, without data.
    """
    parameters = sum(tensor.nbytes for tensor in model.parameters())
    if (numbers := sum(tensor.numel() for tensor in model.buffers())) > MOST_BUFFER_NUMBERS:
        raise CheckpointError(
            f"{what}: the config requires tables of {numbers} numbers; the limit is {MOST_BUFFER_NUMBERS}; correct the config"
        )
    if parameters > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise CheckpointError(f"{what}: the model has {parameters} bytes, but this machine {memory}; use a larger machine")


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Return the modules that `modules.json` of a sentence-transformers folder lists, in order. Return [] for a folder without that
    file. Raises CheckpointError if the file is malformed.
    """
    file = folder / "modules.json"
    if not present(file):
        return []
    modules = _read_json(file, MOST_JSON_BYTES)
    if not isinstance(modules, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in modules
    ):
        raise CheckpointError(f"{file} is not a list of objects with 'type' and 'path'")
    return modules


def subfolder(folder: Path, path: str) -> Path:
    """Return `folder/path`, the folder of a module. Raises CheckpointError if the path leads out of `folder`."""
    try:
        inside = (folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'modules.json'}: path={path!r:.80} is not a valid path ({error})") from None
    if not inside.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / 'modules.json'}: path={path!r} leaves the folder")
    return inside


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of `model.safetensors`, or of the shards that its index lists.

    Raises CheckpointError if there are none, if a shard is missing, or if the folder has only pickled weights.
    """
    if present(folder / WEIGHTS):
        return read_safetensors(folder / WEIGHTS)
    index = folder / WEIGHTS_INDEX
    if present(index):
        return _read_shards(index)
    if pickle := min(folder.glob(PICKLES), default=None):
        raise CheckpointError(f"{folder} has only {pickle.name}, a pickle, which can run any code when read; {HOW_TO_CONVERT}")
    raise CheckpointError(f"{folder} has no weights: {WEIGHTS} is missing; copy it too, or save the model again with save_pretrained")


def _read_shards(index: Path) -> dict[str, Tensor]:
    owner = read_settings(index, most_bytes=MOST_INDEX_BYTES).need("weight_map")  # tensor name -> file name
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(owner.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the shard {name!r}, which is not a plain file name")
        if not present(index.parent / name):
            raise CheckpointError(f"{str(index.parent / name)!r}, a shard named in {WEIGHTS_INDEX}, is missing; copy it to the folder")
        tensors |= read_safetensors(index.parent / name)
    return tensors


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file. In a rehearsal (see `rehearsed`) the returned tensors have shapes but no data."""
    regular(file)
    with file.open("rb") as stream:
        if (size := int.from_bytes(stream.read(8), "little")) > MOST_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file (its header would have {size} bytes; the limit is {MOST_HEADER_BYTES}); copy it again"
            )
    try:
        return _shapes(file) if rehearsing() else load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file ({in_a_line(error)}); copy it again") from error


def _shapes(file: Path) -> dict[str, Tensor]:
    tensors = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  `opened` is not a dictionary
            kind = opened.get_slice(name).get_dtype()
            if kind not in _DTYPES:
                raise CheckpointError(f"{file}: {name} has the type {kind}; supported are {', '.join(_DTYPES)}; convert it")
            tensors[name] = torch.empty(opened.get_slice(name).get_shape(), dtype=_DTYPES[kind], device="meta")
    return tensors


def _read_json(file: Path, most_bytes: int) -> Any:
    text = read_text(file, most_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{file} is nested too deeply; copy it again") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); copy it again") from error


def read_text(file: Path, most_bytes: int) -> str:
    """Read a text file of a checkpoint. Raises CheckpointError if it is not UTF-8, or if `regular` rejects it."""
    try:
        return regular(file, most_bytes=most_bytes).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); copy it again") from error
