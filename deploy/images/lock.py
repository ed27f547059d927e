"""Write requirements-*.txt: what the images install, each package with its version and the hash of the one file that is taken.

    python deploy/images/lock.py        # with the image's Python: 3.11, Linux, x86-64

pip resolves what pyproject.toml asks for, as it would in the image, and installs nothing. An image for another processor or another Python
needs a lock of its own, made there.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PYPROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
# The extras of the wheel bring CUDA and cuDNN themselves: the image needs no CUDA base, and the machine nothing but its driver.
CUDA_LIBRARIES = "[cuda,cudnn]"


def wanted() -> dict[str, list[str]]:
    """Requirements by the name of their lock."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    cpu = [*project["dependencies"], *extras["trace"], *PYPROJECT["build-system"]["requires"]]
    gpu = [re.sub(r"^onnxruntime-gpu", rf"\g<0>{CUDA_LIBRARIES}", one) for one in extras["gpu"]]
    without_cpu_runtime = [one for one in cpu if not re.match(r"onnxruntime\b", one)]
    return {"cpu": cpu, "gpu": without_cpu_runtime + gpu, "load": cpu + extras["loadtest"]}


def resolve(requirements: list[str]) -> list[str]:
    """`name==version --hash=...` of everything that these requirements need, by name."""
    # Isolated: the index and the extra folders of whoever runs this would decide otherwise.
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary=:all:"]
    report = subprocess.run([*command, "--report", "-", *requirements], check=True, capture_output=True, text=True).stdout
    packages = [(one["metadata"], one["download_info"]["archive_info"]["hashes"]["sha256"]) for one in json.loads(report)["install"]]
    return sorted(f"{metadata['name'].lower()}=={metadata['version']} --hash=sha256:{digest}" for metadata, digest in packages)


if __name__ == "__main__":
    for name, requirements in wanted().items():
        lines = ["# Written by lock.py from pyproject.toml, for Python 3.11 on Linux x86-64.", *resolve(requirements)]
        (HERE / f"requirements-{name}.txt").write_text("\n".join(lines) + "\n")
        print(f"requirements-{name}.txt: {len(lines) - 1} packages")
