"""What a document is cut into, and how texts are shared out."""

from collections import Counter
from pathlib import Path

import pytest

from models.training.corpus import CorpusError, TextDocument
from models.training.distillation.pieces import cut, pieces

PROSE = """# Tables

A table has rows and rows have cells, as one would expect of a table. There is more to say about them.

Usage
-----

Short.
"""


def kinds(file: str, text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for piece in pieces(TextDocument(package="p", file=file, text=text)):
        found.setdefault(piece.kind, []).append(piece.text)
    return found


def test_documentation() -> None:
    found = kinds("a.md", PROSE)
    assert found["prose"][0].startswith("A table has rows")
    assert found["short"] == ["A table has rows and rows have cells, as one would expect of a table.", "Tables", "Usage"]


def test_long_documents_are_cut_into_stretches() -> None:
    found = kinds("a.md", "A sentence of some length that comes again and again.\n" * 500)
    assert [len(text) for text in found["long"]] == pytest.approx([12_000, 12_000, 3_000], abs=5)


def test_python_that_does_not_parse_gives_nothing_but_its_length() -> None:
    assert kinds("a.py", "def (:\n") == {}


def test_no_text_is_in_both_splits(data: Path) -> None:
    splits = cut(data, per_kind={"train": 60, "held_out": 20})
    texts = {split: {piece.text for piece in found} for split, found in splits.items()}
    assert all(texts.values())
    assert not texts["train"] & texts["held_out"]
    assert {piece.package for piece in splits["held_out"]} == {"q0"}
    for split, most in (("train", 60), ("held_out", 20)):
        assert max(Counter(piece.kind for piece in splits[split]).values()) <= most


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"models\.training collect"):
        cut(tmp_path, per_kind={"train": 1, "held_out": 1})
