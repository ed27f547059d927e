"""Cuts documents into texts of several kinds, from a few words to a few pages, like the texts that clients send to an encoder.

prose      paragraphs of documentation            short      first sentences, comments, headings
docstring  docstrings, without their indentation  symbols    lines that are mostly digits and punctuation
code       a function or class                    long       a part of a document, usually longer than the teacher's limit
scripts    messages in non-Latin scripts, from the message catalogues of packages (`translated`)
"""

import ast
import gettext
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from models.training.corpus import TextDocument

KINDS = ("prose", "docstring", "code", "short", "symbols", "scripts", "long")
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


def translated(catalogue: Path, package: str) -> Iterator[TextPiece]:
    """Yield the messages of a compiled catalogue (.mo) in which over a quarter of the characters are beyond U+00FF."""
    with catalogue.open("rb") as file:
        messages = gettext.GNUTranslations(file)._catalog.values()  # type: ignore[attr-defined]
    for message in messages:
        if len(message) >= 8 and sum(ord(character) > 255 for character in message) > len(message) / 4:
            yield TextPiece("scripts", package, message.strip()[:LONGEST])


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
