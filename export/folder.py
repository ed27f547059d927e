"""Creates the directory of a bundle, and the manifest's entries about its files, the time of the export and the exporting tools."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from export import contract
from export.errors import ExportError


def files_of(folder: Path) -> tuple[contract.File, ...]:
    """Return name, hash and size of every file in `folder`, sorted by name, for the manifest's field `files`."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return tuple(contract.File(name=path.name, sha256=contract.sha256(path), size_bytes=path.stat().st_size) for path in files)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a new directory and rename it to `out` at the end. After an error or Ctrl-C, `out` is unchanged. Raises ExportError if `out`
    exists and is neither a bundle nor an empty directory.
    """
    out = out.resolve()
    if out.exists() and not (out.is_dir() and ((out / contract.MANIFEST).is_file() or not any(out.iterdir()))):
        raise ExportError(f"{out} exists and is not a bundle; choose another --out, or move it away")
    out.parent.mkdir(parents=True, exist_ok=True)
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{part}") for part in ("new", "old"))
    new.mkdir()
    try:
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def checked_name(name: str) -> str:
    """Return `name`. Raises ExportError if it is not a valid model name."""
    if not re.fullmatch(contract.NAME, name):
        raise ExportError(f"{name!r} is not a model name: letters, digits, and after the first also . _ - /; give another with --name")
    return name


def now() -> str:
    """Return the current time in the form of the manifest's field `created`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def tools() -> str:
    """Return the exporter's tools with their versions, for the manifest's field `tool`."""
    return ", ".join(f"{package} {version(package)}" for package in ("attnserve", "torch", "onnx", "onnxruntime"))
