"""The directions between the folders of the export, and what each folder's docstring names."""

from pathlib import Path

import pytest

from tests.imports import ROOT, crowded, folder_of, name_of, undescribed, upward

EXPORT = ROOT / "export"
FILES = sorted(EXPORT.rglob("*.py"))
# From the lowest to the highest: a file imports its own folder and those before it.
ORDER = [
    *("errors", "contract", "checks", "graphs", "int8", "blocks", "gpu", "kinds", "maps", "folder", "bundle", "summary"),
    *("comparison", "commands"),
]


def test_every_folder_has_its_place() -> None:
    assert {folder_of(name_of(file)) for file in FILES} - {""} == set(ORDER)


def test_nothing_lower_imports_anything_higher() -> None:
    assert upward(EXPORT, ORDER) == []


def test_no_folder_is_a_heap() -> None:
    assert crowded(FILES) == {}


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_what_each_of_its_files_is(folder: Path) -> None:
    assert undescribed(folder) == set()
