"""Cuts documents into texts of several kinds, from a few words to a few pages, like the texts that clients send to an encoder.

prose      paragraphs of documentation            short      first sentences, comments, headings
docstring  docstrings, without their indentation  symbols    lines that are mostly digits and punctuation
code       a function or class                    long       a part of a document, usually longer than the teacher's limit
"""

import ast
import hashlib
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from models.training.corpus import SPLITS, CorpusError, TextDocument, read_texts

PYTHON_BYTES = 16_000_000  # Python files to cut
LONGEST = 3_000  # maximum characters of a piece, about 600 tokens
LONG = 12_000  # maximum characters of a "long" piece, up to 3,000 tokens
WORD = re.compile(r"[A-Za-z]{2,}")
SENTENCE = re.compile(r"(.+?[.?!])(\s|$)", re.DOTALL)
HEADING = re.compile(r"^#{1,4} (.+)$|^(.+)\n[=\-~^]{3,}$", re.MULTILINE)
COMMENT = re.compile(r"(?:^[ \t]*# ?(?![!:]).*\n)+", re.MULTILINE)


class TextPiece(NamedTuple):
    kind: str
    package: str
    text: str


def pieces(document: TextDocument) -> Iterator[TextPiece]:
    """Yield the pieces of a document. Pieces without a letter or digit are left out."""
    python = document.file.endswith(".py")
    found = _of_python(document.text) if python else _of_prose(document.text)
    for kind, text in (*found, *_long(document.text)):
        text = text.strip()[: LONG if kind == "long" else LONGEST]
        if any(character.isalnum() for character in text):
            yield TextPiece(kind, document.package, text)


def cut(data: Path, *, per_kind: Mapping[str, int]) -> dict[str, list[TextPiece]]:
    """Cut the documents of a data folder, which `models.training.collect` wrote. Return for each split at most `per_kind[split]` pieces of
    each kind.

    No text occurs twice, neither within a split nor in both. For each kind, the packages contribute in turns, so that none dominates.
    Raises CorpusError if the folder cannot be used or a split has no text.
    """
    seen: set[str] = set()
    kept = {}
    for split in sorted(SPLITS):  # held_out first, so that equal texts are removed from the training text
        found = _new((piece for document in _first(read_texts(data, split)) for piece in pieces(document)), seen)
        if not (taken := _shared_out(found, per_kind[split])):
            raise CorpusError(f"{data} has no text for {split}; collect more with `python -m models.training collect`")
        kept[split] = taken
    return kept


def _first(documents: Iterable[TextDocument]) -> Iterator[TextDocument]:
    """Yield all documentation files, and Python files up to `PYTHON_BYTES`. The files are ordered by hash, so these are a random sample."""
    total = 0
    for document in documents:
        total += document.size_bytes if document.file.endswith(".py") else 0
        if total <= PYTHON_BYTES or not document.file.endswith(".py"):
            yield document


def _new(found: Iterable[TextPiece], seen: set[str]) -> Iterator[TextPiece]:
    for piece in found:
        if (text := " ".join(piece.text.lower().split())) not in seen:
            seen.add(text)
            yield piece


def _shared_out(found: Iterable[TextPiece], at_most: int) -> list[TextPiece]:
    """Return at most `at_most` pieces of each kind, taken in turns from the packages, ordered by hash."""
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


def _of_python(text: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parsing warns of invalid escapes in the code
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        if doc:
            yield "docstring", inspect.cleandoc(doc)
            yield from _first_sentence(doc)
        if not isinstance(node, ast.Module):
            yield "code", inspect.cleandoc("\n" + "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    for comment in COMMENT.findall(text):
        yield "short", " ".join(line.strip().removeprefix("#").strip() for line in comment.strip().split("\n"))
    yield from _symbols(lines)


def _of_prose(text: str) -> Iterator[tuple[str, str]]:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
    for i, paragraph in enumerate(paragraphs):
        if len(WORD.findall(paragraph)) >= 8:
            yield "prose", "\n\n".join(paragraphs[i : i + 1 + i % 4])  # one to four paragraphs
            yield from _first_sentence(paragraph)
    for heading in HEADING.findall(text):
        yield "short", "".join(heading)
    yield from _symbols(text.split("\n"))


def _first_sentence(text: str) -> Iterator[tuple[str, str]]:
    found = SENTENCE.match(text)
    if found and len(found[1]) < 300:
        yield "short", " ".join(found[1].split())


def _symbols(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each line that is mostly digits and punctuation. Lines with an odd index are yielded together with the two lines after
    them.
    """
    for i, line in enumerate(lines):
        dense = line.replace(" ", "")
        if len(dense) >= 6 and sum(character.isalpha() for character in dense) < 0.45 * len(dense) and len(set(dense)) > 4:
            yield "symbols", "\n".join(lines[i : i + 1 + 2 * (i % 2)])


def _long(text: str) -> Iterator[tuple[str, str]]:
    """Yield consecutive parts of the text, of LONG characters each. The last part may be shorter. It is left out if it has fewer than
    LONGEST characters.
    """
    for start in range(0, len(text), LONG):
        if len(text) - start >= LONGEST:
            yield "long", text[start : start + LONG]
