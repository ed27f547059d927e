"""The CUDA provider of the pinned release, without a GPU: it takes every node, and after its first run a shape is one launch.

Runs where `python -m tests.gpu.driver FOLDER` has built its runtime and ATTNSERVE_CUDA_STUB names the folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.driver import VARIABLE, environment

pytestmark = [pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no folder (tests/gpu/driver/__init__.py)")]


def run(module: str, *arguments: str) -> str:
    """What a process with onnxruntime-gpu prints."""
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, env=environment(Path(os.environ[VARIABLE])), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()[-1]


def test_a_recorded_run_is_one_copy_each_way_and_one_launch(gpu_bundle: Path) -> None:
    first, second, third = json.loads(run("tests.gpu.driver.probe", str(gpu_bundle)))
    assert first["recordings"] + second["recordings"] == 1
    # A copy from the host in a recorded run would read the host's memory again in every later run, when it holds something else.
    assert first["copied_while_recording"] == second["copied_while_recording"] == 0
    assert {name: third[name] for name in ("launches", "to_device", "to_host", "on_device", "allocations", "replays", "recordings")} == {
        "launches": 0,
        "to_device": 1,
        "to_host": 1,
        "on_device": 0,
        "allocations": 0,
        "replays": 1,
        "recordings": 0,
    }
