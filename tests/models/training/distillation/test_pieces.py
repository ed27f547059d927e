"""What a document is cut into, and how texts are shared out."""

import json
from pathlib import Path

import pytest

from models.training.corpus import CorpusError, TextDocument
from models.training.distillation.collect import collect_pieces
from models.training.distillation.pieces import TextPiece, pieces, translated

CODE = '''"""Reads tables. It does so row by row."""

# A table has rows,
# and rows have cells.
SIZES = (12, 34, 56, 78, 90)


class Table:
    """Rows and cells."""

    def row(self, i):
        return self.rows[i]
'''
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


def test_python() -> None:
    found = kinds("a.py", CODE)
    assert found["docstring"] == ["Reads tables. It does so row by row.", "Rows and cells."]
    assert found["code"] == [CODE[CODE.index("class") :].strip(), "def row(self, i):\n    return self.rows[i]"]
    assert found["short"] == ["Reads tables.", "Rows and cells.", "A table has rows, and rows have cells."]
    assert found["symbols"] == ["SIZES = (12, 34, 56, 78, 90)"]
    assert "long" not in found


def test_documentation() -> None:
    found = kinds("a.md", PROSE)
    assert found["prose"][0].startswith("A table has rows")
    assert found["short"] == ["A table has rows and rows have cells, as one would expect of a table.", "Tables", "Usage"]


def test_long_documents_are_cut_into_stretches() -> None:
    found = kinds("a.md", "A sentence of some length that comes again and again.\n" * 500)
    assert [len(text) for text in found["long"]] == pytest.approx([12_000, 12_000, 3_000], abs=5)


def test_python_that_does_not_parse_gives_nothing_but_its_length() -> None:
    assert kinds("a.py", "def (:\n") == {}


def test_messages_in_other_scripts(tmp_path: Path) -> None:
    file = tmp_path / "messages.mo"
    write_catalogue(file, {"yes": "да", "A table has rows": "В таблице есть строки", "Rows": "Die Zeilen der Tabelle"})
    assert list(translated(file, "p")) == [TextPiece("scripts", "p", "В таблице есть строки")]


def test_no_text_is_in_both_splits(data: Path) -> None:
    splits = {split: [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()] for split in ("train", "held_out")}
    texts = {split: {piece["text"] for piece in found} for split, found in splits.items()}
    assert all(texts.values())
    assert not texts["train"] & texts["held_out"]
    assert {piece["package"] for piece in splits["held_out"]} == {"q0"}
    summary = json.loads((data / "sources.json").read_text())
    assert sum(summary["kinds"]["train"].values()) == len(splits["train"])
    assert {package["split"] for package in summary["packages"]} == {"train", "held_out"}


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"models\.training collect"):
        collect_pieces(tmp_path, tmp_path / "out", per_kind={"train": 1, "held_out": 1})


def write_catalogue(file: Path, messages: dict[str, str]) -> None:
    """A .mo file, as `msgfmt` writes it: a header, two tables of (length, offset), the strings."""
    messages = {"": "Content-Type: text/plain; charset=UTF-8\n", **messages}
    keys = sorted(messages)
    ids, strings = ([text.encode() for text in found] for found in (keys, [messages[key] for key in keys]))
    offset, tables, body = 28 + 16 * len(keys), [], b""
    for found in (ids, strings):
        for text in found:
            tables += [len(text), offset + len(body)]
            body += text + b"\0"
    header = [0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0]
    file.write_bytes(b"".join(number.to_bytes(4, "little") for number in [*header, *tables]) + body)
