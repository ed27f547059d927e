"""The directions between the folders of the models."""

from pathlib import Path

import pytest

from tests.imports import ROOT, crowded, files_between, folder_of, name_of, undescribed, upward

MODELS = ROOT / "models"
FILES = sorted(MODELS.rglob("*.py"))
# From the lowest to the highest: a file imports its own folder and those before it.
ORDER = [
    *("parts", "attention", "layers", "folders", "encoder", "decoder", "reformer", "checkpoints", "encoder_decoder", "maps"),
    "training",
]
MECHANISMS = ["layers", "scoring", "sparse", "recurrent", "linear", "gated"]  # the same within attention


def test_every_folder_has_its_place() -> None:
    assert {folder_of(name_of(file)) for file in FILES} - {""} == set(ORDER)
    assert {folder.name for folder in (MODELS / "attention").iterdir() if (folder / "__init__.py").exists()} == set(MECHANISMS)


def test_nothing_lower_imports_anything_higher() -> None:
    assert upward(MODELS, ORDER) == []
    kinds = {name: name.split(".")[2] for name in files_between(MODELS / "attention") if name.count(".") > 2}
    arrows = files_between(MODELS / "attention")
    rank = MECHANISMS.index
    assert [(name, other) for name, kind in kinds.items() for other in arrows[name] & set(kinds) if rank(kinds[other]) > rank(kind)] == []


def test_no_folder_is_a_heap() -> None:
    assert crowded(FILES) == {}


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_what_each_of_its_files_is(folder: Path) -> None:
    assert undescribed(folder) == set()


def test_the_tests_have_the_folders_of_the_models() -> None:
    tests = ROOT / "tests" / "models"
    folders = {folder.relative_to(tests) for folder in tests.rglob("*") if (folder / "__init__.py").exists()}
    assert [str(folder) for folder in sorted(folders) if not (MODELS / folder / "__init__.py").exists()] == []
    assert crowded(tests.rglob("*.py")) == {}
