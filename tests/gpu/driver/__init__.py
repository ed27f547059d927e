"""A CUDA runtime without a GPU, with which onnxruntime-gpu's own CUDA provider can be asked what it would do.

`python -m tests.gpu.driver FOLDER` downloads onnxruntime-gpu (256 MB) and CUDA's headers from the package index and builds `cuda.c` with
gcc. `probe.py` then runs a bundle's graph for GPUs there. `tests/gpu/test_release.py` uses the folder if ATTNSERVE_CUDA_STUB names it.
"""

import os
from pathlib import Path

VARIABLE = "ATTNSERVE_CUDA_STUB"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process with onnxruntime-gpu and this runtime."""
    root = Path(__file__).parents[3]
    return {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "PYTHONPATH": f"{folder / 'site'}:{root}"}
