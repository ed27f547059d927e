"""Collects training text from installed packages.

Whole packages are held out for evaluation. A file is left out if it is a copy or a near copy of a file that is kept. A near copy is a
file of which more than half of the distinct lines of at least 20 characters occur in kept files. Held-out packages are read first, so
that files similar to theirs are removed from the training text and not from the held-out text. The standard library is kept whole if it
fits into the largest allowed size. Of the other packages the largest are cut until the text fits, so that no single package dominates.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from models.training.corpus import TextDocument, write_texts
from models.training.sources import STANDARD_LIBRARY, Package, packages, texts
from service.errors import AttnserveError

MB = 1_000_000
SEEN = 0.5  # a file is a near copy if a larger share of its lines occurs in kept files
HELD_OUT_FILE = 50_000  # largest held-out file in bytes, because a softmax model evaluates a document in quadratic time
LINE = 20  # fewest characters of a compared line; shorter ones, such as `return None`, occur in most files


class CollectionError(AttnserveError, ValueError):
    """No text was found for a split. The message names the split."""


@dataclass
class KeptText:
    """The hashes of all files and lines that are kept so far."""

    files: set[bytes] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def copy_of_kept(self, text: str) -> str | None:
        """Return the reason why the text is left out, or None if it is kept. A kept text is added, so later texts are compared with it."""
        digest = hashlib.sha256(text.encode()).digest()
        lines = {hash(line) for line in map(str.strip, text.split("\n")) if len(line) >= LINE}
        if digest in self.files:
            return "a copy"
        if len(lines & self.lines) > SEEN * len(lines):
            return "a near copy"
        self.files.add(digest)
        self.lines |= lines
        return None


def collect(out: Path, *, held_out: Sequence[str], max_mb: float = 64, max_held_out_mb: float = 2) -> dict[str, Any]:
    """Write the folder `out` and return the content of its `sources.json`. Raises CollectionError if a split would be empty."""
    names = {name.lower() for name in held_out}
    installed = packages()
    allowed = [package for package in installed if package.licence.permissive]
    allowed.sort(key=lambda package: package.name.lower() not in names)  # held-out packages first; the sort is stable
    seen, kept, left_out = KeptText(), {}, {}
    for package in track(allowed, "reading packages", console=Console(stderr=True), transient=True):
        kept[package.name], left_out[package.name] = _documents(package, seen)
    evaluation = {
        name: [d for d in documents if d.size_bytes <= HELD_OUT_FILE] for name, documents in kept.items() if name.lower() in names
    }
    training = {name: documents for name, documents in kept.items() if name.lower() not in names and documents}
    if not any(evaluation.values()) or not training:
        raise CollectionError(f"no text {'to hold out: none of ' + ', '.join(held_out) if training else 'to train on'} is installed")
    first = _bounded({name: training.pop(name) for name in (STANDARD_LIBRARY,) if name in training}, max_mb * MB)
    rest = max_mb * MB - sum(map(_size, first.values()))
    splits = {"train": first | _bounded(training, rest), "held_out": _bounded(evaluation, max_held_out_mb * MB)}
    summary = _summary(allowed, [package for package in installed if package not in allowed], splits, left_out)
    write_texts(out, {split: _mixed(documents) for split, documents in splits.items()}, summary)
    return summary


def _documents(package: Package, seen: KeptText) -> tuple[list[TextDocument], Counter[str]]:
    """Return the documents of the package that are kept, and the number of its files left out for each reason."""
    kept, left_out = list[TextDocument](), Counter[str]()
    for file, text, refused in texts(package):
        if text is None or (reason := seen.copy_of_kept(text)):
            left_out[refused or reason or ""] += 1
        else:
            kept.append(TextDocument(package=package.name, file=file, text=text))
    return kept, left_out


def _bounded(documents: dict[str, list[TextDocument]], max_bytes: float) -> dict[str, list[TextDocument]]:
    """Cut the packages to `max_bytes` in total. Small packages are kept whole, and the large ones get equal shares of the bytes that the
    small ones leave.
    """
    sizes = sorted(map(_size, documents.values()))
    share = rest = max_bytes
    for i, size in enumerate(sizes):
        share = rest / (len(sizes) - i)
        if size > share:
            break
        share, rest = size, rest - size
    return {name: _first(_by_hash(kept), share) for name, kept in documents.items()}


def _first(documents: list[TextDocument], max_bytes: float) -> list[TextDocument]:
    taken, total = list[TextDocument](), 0
    for document in documents:
        if total + document.size_bytes <= max_bytes:
            taken.append(document)
            total += document.size_bytes
    return taken


def _size(documents: list[TextDocument]) -> int:
    return sum(document.size_bytes for document in documents)


def _mixed(documents: dict[str, list[TextDocument]]) -> list[TextDocument]:
    return _by_hash([document for kept in documents.values() for document in kept])


def _by_hash(documents: list[TextDocument]) -> list[TextDocument]:
    """Sort by a hash of the names: an arbitrary order that is the same in every run."""
    return sorted(documents, key=lambda d: hashlib.sha256(f"{d.package}/{d.file}".encode()).digest())


def _summary(
    allowed: list[Package], refused: list[Package], splits: dict[str, dict[str, list[TextDocument]]], left_out: dict[str, Counter[str]]
) -> dict[str, Any]:
    used = {name: (split, kept) for split, documents in splits.items() for name, kept in documents.items() if kept}
    return {
        "rule": "packages whose metadata names permissive licences only (models/training/licences.py), and the standard library",
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                "licence": package.licence.name,
                "licence_field": package.licence.field,
                "split": used[package.name][0],
                "files": len(used[package.name][1]),
                "bytes": _size(used[package.name][1]),
                "left_out": dict(left_out[package.name]),
            }
            for package in allowed
            if package.name in used
        ],
        "refused": [{"name": package.name, "version": package.version, "licence": package.licence.name} for package in refused],
        "totals": {
            split: {"bytes": sum(map(_size, documents.values())), "files": sum(map(len, documents.values()))}
            for split, documents in splits.items()
        },
    }
