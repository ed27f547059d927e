"""Write requirements-*.txt, which pin every package of the images: its version and the hash of one wheel per processor architecture.

    python deploy/images/lock.py        # needs the network and pip 24 or later; any machine and any Python that pip runs on

pip resolves the requirements of pyproject.toml, first for linux/amd64 and then, with the same versions, for linux/arm64. Nothing is
installed. The comment after a line's hashes lists the tags of the wheels, so that a test can check offline for which architectures a
package is locked. A package that only one architecture needs has a marker. Another Python version needs its own lock.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).parent
PYPROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
PYTHON = "3.11"
GLIBC_MINOR = 36  # glibc 2.36 of Debian 12, the images' base
MACHINES = ("x86_64", "aarch64")
# These wheels include CUDA and cuDNN, so the image needs no CUDA base, and the machine needs only its driver.
CUDA_LIBRARIES = "[cuda,cudnn]"
# pip selects wheels by `--platform`, but evaluates markers (`platform_machine == "x86_64"`) for the machine that it runs on.
PIP_ON = "import platform, sys; platform.machine = lambda: {machine!r}; from pip._internal.cli.main import main; sys.exit(main())"


def wanted() -> dict[str, list[str]]:
    """Return the requirements of each lock file, by the file's name."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    cpu = [*project["dependencies"], *extras["trace"], *extras["fetch"], *extras["redis"], *PYPROJECT["build-system"]["requires"]]
    gpu = [re.sub(r"^onnxruntime-gpu", rf"\g<0>{CUDA_LIBRARIES}", one) for one in extras["gpu"]]
    without_cpu_runtime = [one for one in cpu if not re.match(r"onnxruntime\b", one)]
    return {"cpu": cpu, "gpu": without_cpu_runtime + gpu, "load": cpu + extras["loadtest"]}


def platforms(machine: str) -> list[str]:
    """Return the platform tags of wheels that the images can use, newest first."""
    named = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    tags = [tag for minor in range(GLIBC_MINOR, 4, -1) for tag in (f"manylinux_2_{minor}", named.get(minor)) if tag]
    return [f"{tag}_{machine}" for tag in (*tags, "linux")]


def resolve(requirements: list[str], machine: str, versions: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return pip's report of each package that the requirements need on `machine`, by name. `versions` are constraints."""
    # Ignore the user's pip configuration, which could name other indexes and folders.
    command = [sys.executable, "-c", PIP_ON.format(machine=machine), "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    command += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")] + [f"--platform={tag}" for tag in platforms(machine)]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        command += ["--target", folder, "--constraint", str(constraints), "--report", "-"]
        report = subprocess.run([*command, *requirements], check=True, capture_output=True, text=True).stdout
    return {one["metadata"]["name"].lower(): one for one in json.loads(report)["install"]}


def line(name: str, on: dict[str, dict[str, Any]]) -> str:
    """Return a package's line, `name==version [; marker] --hash=... # tags`. `on` has its report for each machine that needs it."""
    (version,) = {one["metadata"]["version"] for one in on.values()}
    marker = "" if len(on) == len(MACHINES) else f' ; platform_machine == "{next(iter(on))}"'
    wheels = {}
    for one in on.values():
        download = one["download_info"]
        tags = PurePosixPath(download["url"]).name.removesuffix(".whl").split("-", 2)[2]  # an optional build number stays in front
        wheels[download["archive_info"]["hashes"]["sha256"]] = tags
    return f"{name}=={version}{marker} {' '.join(f'--hash=sha256:{digest}' for digest in wheels)}  # {' '.join(wheels.values())}"


def locked(requirements: list[str]) -> list[str]:
    """Return the lines of a lock file."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    versions: dict[str, str] = {}
    for machine in MACHINES:
        for name, one in resolve(requirements, machine, versions).items():
            found.setdefault(name, {})[machine] = one
            versions[name] = one["metadata"]["version"]
    return sorted(line(name, on) for name, on in found.items())


if __name__ == "__main__":
    for name, requirements in wanted().items():
        lines = [f"# Written by lock.py from pyproject.toml, for Python {PYTHON} on Linux, {' and '.join(MACHINES)}."]
        lines += locked(requirements)
        (HERE / f"requirements-{name}.txt").write_text("\n".join(lines) + "\n")
        print(f"requirements-{name}.txt: {len(lines) - 1} packages")
