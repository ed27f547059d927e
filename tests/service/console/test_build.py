"""The console's files are what its source builds, and the pure functions of its source are tested."""

import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from service import errors

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "service" / "console" / "source"
STATIC = ROOT / "service" / "console" / "static"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, with the libraries that its lock file names."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: the console is not built again (apt-get install nodejs npm)")
    installed = SOURCE / "node_modules" / ".package-lock.json"
    with FileLock(tmp_path_factory.getbasetemp().parent / "npm-console.lock"):
        if not installed.exists() or installed.stat().st_mtime < (SOURCE / "package-lock.json").stat().st_mtime:
            subprocess.run(["npm", "ci"], cwd=SOURCE, capture_output=True, timeout=300, check=True)
    return SOURCE


@pytest.mark.live
def test_the_files_are_what_the_source_builds(source: Path, tmp_path: Path) -> None:
    command = ["npx", "vite", "build", "--outDir", str(tmp_path / "built"), "--emptyOutDir"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    kept = {path.name: path.read_bytes() for path in STATIC.iterdir()}
    assert sorted(built) == sorted(kept)
    assert [name for name in built if built[name] != kept[name]] == [], "run `make console` and commit service/console/static/"


def test_every_status_of_a_refusal_has_its_reason_on_the_overview() -> None:
    reasons = re.findall(r"\b(\d{3}): '", (SOURCE / "src/pages/Overview.svelte").read_text(encoding="utf-8"))
    refusals = {value.status for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.ServiceError)}
    assert refusals - set(map(int, reasons)) == set()


@pytest.mark.live
def test_the_functions_of_the_source_pass_their_tests(source: Path) -> None:
    done = subprocess.run(["npx", "vitest", "run"], cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_lock_file_names_no_registry() -> None:
    lock = (SOURCE / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in lock
    assert "registry" not in lock
