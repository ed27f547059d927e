"""What the service must not import: torch, a way to load pickles, Ray outside its package, HTTP in the engine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "service"
FILES = sorted(ROOM.rglob("*.py"))
RAY = {*(ROOM / "deployment").glob("*.py"), ROOM / "cli.py"}
# The core: whatever is below HTTP.
CORE = ("batching", "budget", "cache", "engine", "errors", "metrics", "runtime", "selftest", "settings", "tokenization", "vectors")
LOADERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def imported(file: Path) -> set[str]:
    """The top names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names | {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", ["service.app", "service.cli"])
def test_serving_loads_no_torch(module: str) -> None:
    heavy = ("torch", "transformers", "onnx", "onnxscript", "models")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOM.parent, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_application_loads_no_ray() -> None:
    code = "import sys, service.app; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOM.parent, check=False)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOM)))
def test_no_file_imports_torch_or_what_loads_pickles_and_ray_stays_in_its_package(file: Path) -> None:
    names = imported(file)
    assert not names & {"torch", "transformers", *LOADERS}
    assert "models" not in names or file.name == "cli.py", "the command line starts trainings too, and imports them when it does"
    assert "ray" not in names or file in RAY


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOM)))
def test_no_file_lets_numpy_load_pickles(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle")


# The command line starts exports too, and imports them when it does.
@pytest.mark.parametrize("file", [file for file in FILES if file.name != "cli.py"], ids=lambda file: str(file.relative_to(ROOM)))
def test_of_export_the_contract_alone_crosses(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    crossing = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "export"]
    assert all(node.module == "export.contract" or [alias.name for alias in node.names] == ["contract"] for node in crossing)


@pytest.mark.parametrize("module", CORE)
def test_the_core_knows_no_http_and_no_ray(module: str) -> None:
    names = imported(ROOM / f"{module}.py")
    assert not names & {"fastapi", "starlette", "uvicorn", "httpx", "ray"}
    assert not names & {"service.app", "service.edge", "service.routing", "service.dialects", "service.call"}
