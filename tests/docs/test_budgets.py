"""The table of budgets in CONTRIBUTING.md: what it says is at most there. A change that needs more raises the row, with its reason."""

import re
import subprocess

import pytest

from tests.docs.pages import ROOT

_ROW = re.compile(r"^\| `(?P<files>[^`]+)` \| (?P<what>lines|words|lines of a file) \| (?P<most>[\d,]+) \|$", re.MULTILINE)
BUDGETS = [row.groups() for row in _ROW.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))]


def test_every_kind_of_file_has_a_budget() -> None:
    named = {pattern for files, _, _ in BUDGETS for pattern in files.split()}
    assert {f"{folder}/*.py" for folder in ("service", "models", "export", "loadtest", "tests")} | {"*.md", "*.lua"} <= named


@pytest.mark.parametrize(("files", "what", "most"), BUDGETS)
def test_a_folder_is_within_its_budget(files: str, what: str, most: str) -> None:
    tracked = subprocess.run(["git", "ls-files", *files.split()], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in tracked if (ROOT / name).is_file()]
    counts = [len(text.split()) if what == "words" else text.count("\n") for text in texts]
    found = max(counts) if what == "lines of a file" else sum(counts)
    assert 0 < found <= int(most.replace(",", ""))
