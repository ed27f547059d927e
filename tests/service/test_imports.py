"""The directions between the folders of the service, and what none of them may import: torch, a way to load pickles, Ray, HTTP."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT, crowded, cycle, files_between, folder_of, libraries, name_of, undescribed, upward
from tests.service.fakes import PATIENCE_S

SERVICE = ROOT / "service"
FILES = sorted(SERVICE.rglob("*.py"))
# From the lowest to the highest: a file imports its own folder and those before it.
ORDER = [
    *(
        "errors",
        "terminal",
        "settings",
        "settings_page",
        "runtime",
        "states",
        "overload",
        "tokenization",
        "call",
        "telemetry",
        "encoding",
        "generation",
        "encoder_decoder",
        "streams",
    ),
    *("catalog", "pools", "http", "dialects", "app", "deployment", "cli"),
]
HTTP = {"fastapi", "starlette", "uvicorn", "httpx"}
WITH_HTTP = {"http", "dialects", "app", "deployment"}
WITH_RAY = {"deployment"}
LOADERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def test_every_folder_has_its_place() -> None:
    found = {folder_of(name_of(file)) for file in FILES} - {""}
    assert found == set(ORDER)


def test_nothing_lower_imports_anything_higher() -> None:
    assert upward(SERVICE, ORDER) == []


@pytest.mark.parametrize("package", ["service", "models", "export", "loadtest"])
def test_no_file_imports_itself_by_way_of_others(package: str) -> None:
    assert cycle(files_between(ROOT / package)) == []


def test_a_cycle_is_seen() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_folder_is_a_heap() -> None:
    assert crowded(FILES) == {}


@pytest.mark.parametrize("module", ["service.app", "service.cli"])
def test_serving_loads_no_torch(module: str) -> None:
    heavy = ("torch", "transformers", "onnx", "onnxscript", "models", "loadtest")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_application_loads_no_ray() -> None:
    code = "import sys, service.app; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SERVICE)))
def test_libraries_stay_where_they_belong(file: Path) -> None:
    names, folder = libraries(file), folder_of(name_of(file))
    assert not names & {"torch", "transformers", *LOADERS}
    assert not names & {"models", "loadtest"}
    assert "ray" not in names or folder in WITH_RAY
    assert not names & HTTP or folder in WITH_HTTP


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SERVICE)))
def test_no_file_lets_numpy_load_pickles(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SERVICE)))
def test_of_export_the_contract_alone_crosses(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    crossing = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "export"]
    assert all(node.module == "export.contract" or [alias.name for alias in node.names] == ["contract"] for node in crossing)


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_says_what_each_of_its_files_is(folder: Path) -> None:
    assert undescribed(folder) == set()
