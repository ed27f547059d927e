"""The directions between the folders of a package, and what each folder's docstring names. The service: tests/service/test_imports.py."""

import pytest

from tests.imports import ROOT, crowded, folder_of, name_of, undescribed, upward

# From the lowest to the highest: a file imports its own folder and those before it.
ORDERS = {
    "models": (
        *("parts", "attention", "layers", "folders", "encoder", "decoder", "reformer", "checkpoints", "encoder_decoder", "maps"),
        "training",
    ),
    "export": (
        *("errors", "contract", "checks", "graphs", "int8", "blocks", "gpu", "kinds", "maps", "folder", "bundle", "summary"),
        *("comparison", "commands"),
    ),
    "loadtest": ("errors", "common", "load", "users", "locustfile", "shapes", "in_process", "evaluate", "faults", "bench", "commands"),
}
FILES = {package: sorted((ROOT / package).rglob("*.py")) for package in ORDERS}
FOLDERS = [str(folder.relative_to(ROOT)) for files in FILES.values() for folder in sorted({file.parent for file in files})]

every_package = pytest.mark.parametrize("package", ORDERS)


@every_package
def test_every_folder_has_its_place(package: str) -> None:
    assert {folder_of(name_of(file)) for file in FILES[package]} - {""} == set(ORDERS[package])


@every_package
def test_nothing_lower_imports_anything_higher(package: str) -> None:
    assert upward(ROOT / package, ORDERS[package]) == []


@every_package
def test_no_folder_is_a_heap(package: str) -> None:
    assert crowded(FILES[package]) == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_each_of_its_files_is(folder: str) -> None:
    assert undescribed(ROOT / folder) == set()
