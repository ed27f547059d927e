"""Bundles that tests export are kept in .cache/tests of the checkout: one for the same checkpoint, options, code and versions.

A test that is about exporting itself, or that changes what the export calls, uses `export.bundle` directly.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from export import contract
from export.bundle import export_bundle

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "tests"
MOST_BYTES = 2**30  # of all bundles; those that were not used for longest are removed
VERSIONS = ("torch", "onnx", "onnxscript", "onnxruntime", "tokenizers", "numpy")


def exported(checkpoint: Path, out: Path, *, name: str | None = None, **options: Any) -> contract.Manifest:
    """As `export_bundle`, which runs for the first call only: later ones copy its bundle, in other runs and processes too."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / _key(checkpoint, options)
    with FileLock(f"{kept}.lock"):
        shutil.rmtree(out, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, out)
        else:
            export_bundle(checkpoint, out, **options)
            shutil.copytree(out, part := kept.with_suffix(".part"), dirs_exist_ok=True)
            part.rename(kept)
        os.utime(kept)
    _remove_oldest()
    return _renamed(out, name or out.name, checkpoint.name)


def _renamed(bundle: Path, name: str, checkpoint: str) -> contract.Manifest:
    """Give the manifest the names that an export of its own would."""
    manifest = contract.read_manifest(bundle)
    assert manifest.source is not None
    source = manifest.source.model_copy(update={"checkpoint": checkpoint})
    manifest = manifest.model_copy(update={"name": name, "source": source})
    (bundle / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


def _key(checkpoint: Path, options: dict[str, Any]) -> str:
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    return _digest(_code(), sorted((key, value) for key, value in options.items() if value), *_contents(files, checkpoint))


@cache
def _code() -> str:
    """Of all that an export runs."""
    files = [file for folder in ("models", "export") for file in sorted((ROOT / folder).rglob("*")) if "pretrained" not in file.parts]
    sources = [file for file in files if file.is_file() and "__pycache__" not in file.parts]
    return _digest({package: version(package) for package in VERSIONS}, *_contents(sources, ROOT))


def _contents(files: list[Path], root: Path) -> list[object]:
    return [part for file in files for part in (str(file.relative_to(root)), contract.sha256(file))]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _remove_oldest() -> None:
    """What another process copies now stays."""
    with FileLock(CACHE / "removing.lock"):
        kept = sorted((path for path in CACHE.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
        sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in kept]
        for at, path in enumerate(kept):
            if sum(sizes[: at + 1]) > MOST_BYTES:
                with suppress(Timeout), FileLock(f"{path}.lock", blocking=False):
                    shutil.rmtree(path, ignore_errors=True)
