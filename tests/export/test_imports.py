"""The folders of the export: their size, and what each docstring names."""

from pathlib import Path

import pytest

from tests.imports import ROOT, crowded, undescribed

EXPORT = ROOT / "export"
FILES = sorted(EXPORT.rglob("*.py"))


def test_no_folder_is_a_heap() -> None:
    assert crowded(FILES) == {}


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_what_each_of_its_files_is(folder: Path) -> None:
    assert undescribed(folder) == set()
