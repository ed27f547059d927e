"""Cuts collected documents into texts to distil on.

The folder of documents is that of `models.training.collect`, which has already checked licences, removed copies and held out packages.
Texts in non-Latin scripts come from the message catalogues of installed packages, whose licences must pass the same check. For these
texts, too, whole packages are held out. No text occurs twice, neither within a split nor in both splits. For each kind of text, the
packages contribute in turns until the limit for this kind is reached, so that no package dominates.

    OUT/train.jsonl, OUT/held_out.jsonl     one {"kind", "package", "text"} per line, ordered by hash
    OUT/sources.json                        packages, versions, licences, sizes
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from models.training.collect import CollectionError
from models.training.corpus import SOURCES, SPLITS, TextDocument, read_texts
from models.training.distillation.pieces import TextPiece, pieces, translated
from models.training.licences import licence_of

HELD_OUT_CATALOGUES = ("humanize",)
MB = 1_000_000


def collect_pieces(
    data: Path, out: Path, *, per_kind: dict[str, int], max_mb: float = 16, held_out_catalogues: Sequence[str] = HELD_OUT_CATALOGUES
) -> dict[str, Any]:
    """Write the folder `out` and return the content of its sources.json.

    Raises CollectionError if a split has no text, CorpusError if `data` is not a folder of collected texts.
    """
    seen: set[str] = set()
    kept: dict[str, list[TextPiece]] = {}
    catalogues = {split: list(_catalogues(held_out_catalogues, split)) for split in SPLITS}
    for split in sorted(SPLITS):  # held_out first, so that equal texts are removed from the training text
        documents = track(
            list(_first(read_texts(data, split), max_mb * MB)), f"cutting {split}", console=Console(stderr=True), transient=True
        )
        messages = (piece for package, file in catalogues[split] for piece in translated(file, package.metadata["Name"]))
        found = _new((piece for document in documents for piece in pieces(document)), seen)
        kept[split] = _shared_out([*found, *_new(messages, seen)], per_kind[split])
        if not kept[split]:
            raise CollectionError(f"{data} has no text for {split}; collect more with `python -m models.training collect`")
    summary = _summary(json.loads((data / SOURCES).read_text()), catalogues, kept)
    out.mkdir(parents=True, exist_ok=True)
    for split, texts in kept.items():
        (out / f"{split}.jsonl").write_text("".join(json.dumps(piece._asdict(), ensure_ascii=False) + "\n" for piece in texts))
    (out / SOURCES).write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _first(documents: Iterable[TextDocument], max_bytes: float) -> Iterator[TextDocument]:
    """Yield all documentation files, and Python files up to `max_bytes` in total. The files are ordered by hash, so those yielded are a
    random sample."""
    total = 0
    for document in documents:
        total += document.size_bytes if document.file.endswith(".py") else 0
        if total <= max_bytes or not document.file.endswith(".py"):
            yield document


def _catalogues(held_out: Sequence[str], split: str) -> Iterator[tuple[Distribution, Path]]:
    """Yield the compiled message catalogues of installed packages with permissive licences, ordered by package name. For the split
    "held_out" these are the packages that `held_out` names, for "train" all others.
    """
    for distribution in sorted(distributions(), key=lambda found: found.metadata["Name"].lower()):
        if licence_of(distribution.metadata).permissive and (distribution.metadata["Name"].lower() in held_out) == (split == "held_out"):
            for file in sorted(distribution.files or [], key=str):
                if file.suffix == ".mo":
                    yield distribution, Path(str(file.locate()))


def _new(found: Iterable[TextPiece], seen: set[str]) -> Iterator[TextPiece]:
    for piece in found:
        if (text := " ".join(piece.text.lower().split())) not in seen:
            seen.add(text)
            yield piece


def _shared_out(found: Iterable[TextPiece], at_most: int) -> list[TextPiece]:
    """Return at most `at_most` pieces of each kind, taken in turns from the packages that have pieces of that kind. The result is
    ordered by hash, so it is reproducible."""
    by_kind: dict[str, dict[str, list[TextPiece]]] = defaultdict(lambda: defaultdict(list))
    for piece in sorted(found, key=_hash):
        by_kind[piece.kind][piece.package].append(piece)
    taken = []
    for packages in by_kind.values():
        turns = ((turn, piece) for texts in packages.values() for turn, piece in enumerate(texts))
        taken += [piece for _, piece in sorted(turns, key=lambda found: found[0])[:at_most]]
    return sorted(taken, key=_hash)


def _hash(piece: TextPiece) -> bytes:
    return hashlib.sha256(piece.text.encode(errors="replace")).digest()


def _summary(
    documents: dict[str, Any], catalogues: dict[str, list[tuple[Distribution, Path]]], kept: dict[str, list[TextPiece]]
) -> dict[str, Any]:
    known = {
        package["name"]: {key: package[key] for key in ("name", "version", "licence", "licence_field")} for package in documents["packages"]
    }
    for package in {package.metadata["Name"]: package for found in catalogues.values() for package, _ in found}.values():
        licence = licence_of(package.metadata)
        entry = {"name": package.metadata["Name"], "version": package.version, "licence": licence.name, "licence_field": licence.field}
        known.setdefault(entry["name"], entry)
    sizes = Counter({(split, piece.package): 0 for split, texts in kept.items() for piece in texts})
    numbers = Counter((split, piece.package) for split, texts in kept.items() for piece in texts)
    for split, texts in kept.items():
        for piece in texts:
            sizes[split, piece.package] += len(piece.text.encode(errors="replace"))
    return {
        "rule": documents["rule"],
        "packages": [
            known[name] | {"split": split, "texts": numbers[split, name], "bytes": size} for (split, name), size in sorted(sizes.items())
        ],
        "kinds": {split: dict(Counter(piece.kind for piece in texts)) for split, texts in kept.items()},
    }
