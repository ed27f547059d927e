"""What measures from outside imports little of the service."""

from pathlib import Path

import pytest

from tests.imports import ROOT, folder_of, imported, is_module, libraries, name_of

LOADTEST = ROOT / "loadtest"
ENGINES = {"torch", "transformers", "onnx", "onnxruntime", "models"}
# What a measurement from outside shares with the service: errors, output of commands, HAProxy, what a bundle is.
SHARED = {
    *("service.errors", "service.terminal", "service.deployment", "service.deployment.haproxy"),
    *("export", "export.contract"),
}
IN_PROCESS = {"in_process", "evaluate"}
IN_ANOTHER_ENVIRONMENT = {"infinity_model.py"}
OUTSIDE = [
    file
    for file in sorted(LOADTEST.rglob("*.py"))
    if folder_of(name_of(file)) not in IN_PROCESS and file.name not in IN_ANOTHER_ENVIRONMENT
]


@pytest.mark.parametrize("file", OUTSIDE, ids=lambda file: str(file.relative_to(LOADTEST)))
def test_only_folders_that_open_bundles_drive_engines(file: Path) -> None:
    assert not libraries(file) & ENGINES
    ours = {name for name in imported(file) if name.startswith(("service.", "export.")) and is_module(name)}
    assert ours <= SHARED
