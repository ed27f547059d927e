"""Reads the files of a bundle and checks them against its manifest."""

import hashlib
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from export.contract.contradictions import contradictions
from export.contract.manifest import Manifest, dump
from export.contract.names import GOLDEN, MANIFEST
from export.contract.tensors import MOST_JSON_BYTES, BundleError, ManifestPart


def verify(bundle: Path) -> Manifest:
    """Return the manifest after checking all files. Raises BundleError for the first file that is missing, unknown or changed."""
    manifest = read_manifest(bundle)
    for file in manifest.files:
        path = regular(bundle, file.name)
        if (size := path.stat().st_size) != file.size_bytes:
            raise BundleError(f"{path} has {size} bytes, but the manifest has {file.size_bytes}. Export the bundle again.")
        if (digest := sha256(path)) != file.sha256:
            raise BundleError(
                f"{path} was changed after export: sha256 {digest[:12]}…, expected {file.sha256[:12]}…. Export the bundle again."
            )
    # Unlisted files are an error, because an ONNX graph could read any file in the folder as its weights.
    if unknown := sorted(set(os.listdir(bundle)) - {file.name for file in manifest.files} - {MANIFEST}):
        raise BundleError(f"{bundle} has {unknown[0]!r}, which its manifest does not list: remove it, or export the bundle again.")
    return manifest


def regular(bundle: Path, name: str, *, most_bytes: int | None = None) -> Path:
    """Return the path of a file in the bundle. Raises BundleError if it is missing, too large, not regular, or a link to a file outside."""
    path = bundle / name
    try:
        found = path.resolve(strict=True)
        about = found.stat()
        if not found.is_relative_to(bundle.resolve(strict=True)):
            raise BundleError(f"{path} is a link to a place outside the bundle, which is not followed. Copy the bundle with its files.")
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} is missing. Export the bundle again.") from None
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a link to itself, or a name that is too long
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from None
    if not stat.S_ISREG(about.st_mode):
        raise BundleError(f"{path} is not a regular file. Export the bundle again.")
    if most_bytes is not None and about.st_size > most_bytes:
        raise BundleError(f"{path} has {about.st_size} bytes; the limit is {most_bytes}. Export the bundle again.")
    return path


def read_text(bundle: Path, name: str, *, most_bytes: int = MOST_JSON_BYTES) -> str:
    """Return the text of a file in the bundle. Raises BundleError as `regular` does, and for text that is not UTF-8."""
    path = regular(bundle, name, most_bytes=most_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error


def read_manifest(bundle: Path) -> Manifest:
    """Return the manifest without checking the other files. Raises BundleError if it is missing, invalid, changed or contradicts
    itself."""
    path = bundle / MANIFEST
    if not os.path.exists(path):  # noqa: PTH110  # also False for a path that no file can have
        raise BundleError(
            f"{bundle} is not a bundle: it has no {MANIFEST}. Make one with `attnserve export --checkpoint DIR --out {bundle}`."
        )
    text = read_text(bundle, MANIFEST)
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("fingerprint", None)
        manifest = Manifest.model_validate(content)
        written = dump(manifest)
    except ValidationError as error:
        raise BundleError(f"{path} cannot be read: {_sentence(error)}. Export the bundle again.") from error
    except RecursionError:
        raise BundleError(f"{path} cannot be read: it is nested too deeply. Export the bundle again.") from None
    except ValueError as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error
    if text != written:
        raise BundleError(f"{path} was changed after export: its text does not match its fingerprint. Export the bundle again.")
    if (problem := next(contradictions(manifest), None)) is not None:
        raise BundleError(f"{path} contradicts itself: {_printable(problem)}. Export the bundle again.")
    return manifest


def _printable(text: str) -> str:
    """Escape control characters and line breaks, because names in a manifest come from the bundle's author."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _sentence(error: ValidationError) -> str:
    """Describe the first invalid field in one sentence."""
    first = error.errors()[0]
    field = _printable(".".join(map(str, first["loc"]))) or "the whole"
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field}={reprlib.repr(first['input'])} is not accepted: {first['msg']}"


G = TypeVar("G", bound=ManifestPart)


def read_golden(bundle: Path, kind: type[G]) -> G:
    """Read golden.json as an object of the class `kind`. Raises BundleError if it is invalid or empty, or if its lists differ in length."""
    try:
        return kind.model_validate_json(read_text(bundle, GOLDEN))
    except ValidationError as error:
        raise BundleError(f"{bundle / GOLDEN} cannot be read: {_sentence(error)}. Export the bundle again.") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
