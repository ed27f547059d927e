"""The directions between the folders of loadtest, and what measures from outside imports of the service."""

from pathlib import Path

import pytest

from tests.imports import ROOT, crowded, folder_of, imported, is_module, libraries, name_of, undescribed, upward

LOADTEST = ROOT / "loadtest"
FILES = sorted(LOADTEST.rglob("*.py"))
# From the lowest to the highest: a file imports its own folder and those before it.
ORDER = [
    "errors",
    "common",
    "load",
    "users",
    "locustfile",
    "shapes",
    "in_process",
    "faults",
    "bench",
    "commands",
]
ENGINES = {"torch", "transformers", "onnx", "onnxruntime", "models"}
# What a measurement from outside shares with the service: errors, output of commands, free ports, HAProxy, what a bundle is.
SHARED = {
    "service.errors",
    "service.terminal",
    "service.deployment",
    "service.deployment.ports",
    "service.deployment.haproxy",
    "export",
    "export.contract",
}
IN_ANOTHER_ENVIRONMENT = {"infinity_model.py"}
OUTSIDE = [file for file in FILES if folder_of(name_of(file)) != "in_process" and file.name not in IN_ANOTHER_ENVIRONMENT]


def test_every_folder_has_its_place() -> None:
    assert {folder_of(name_of(file)) for file in FILES} - {""} == set(ORDER)


def test_nothing_lower_imports_anything_higher() -> None:
    assert upward(LOADTEST, ORDER) == []


def test_no_folder_has_too_many_files() -> None:
    assert crowded(FILES) == {}


@pytest.mark.parametrize("file", OUTSIDE, ids=lambda file: str(file.relative_to(LOADTEST)))
def test_only_in_process_drives_engines(file: Path) -> None:
    assert not libraries(file) & ENGINES
    ours = {name for name in imported(file) if name.startswith(("service.", "export.")) and is_module(name)}
    assert ours <= SHARED


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_what_each_of_its_files_is(folder: Path) -> None:
    assert undescribed(folder) == set()
