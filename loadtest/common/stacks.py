"""Samples the Python stacks of a running process with py-spy, and divides the samples among the phases of a request."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtest.errors import LoadtestError

# (phase, parts of a frame that belong to it). A sample belongs to the phase of its innermost frame that has one.
PHASES = (
    ("wait", ("main_loop (ray/", "Thread.run (", "socket.accept (")),  # threads that py-spy takes for running
    ("runtime call", ("onnxruntime/", "service/runtime/onnx.py")),
    ("tokenise", ("service/tokenization/",)),
    ("encode the answer", ("service/http/answers.py", "service/encoding/vectors.py")),
    ("parse", ("service/http/routing.py", "service/http/fields.py", "pydantic/")),
    ("queue and threads", ("service/encoding/", "service/runtime/")),
    ("admit and count", ("service/http/", "service/overload/", "service/telemetry/", "service/call.py", "prometheus_client/")),
    ("route", ("service/dialects/", "service/app.py", "fastapi/", "starlette/")),
    ("read and write HTTP", ("uvicorn/", "asyncio/", "uvloop")),
)
_RATE = 250  # samples a second
_SLACK_S = 30.0  # longest time for py-spy to end after the last sample


def binary() -> str | None:
    """Return the path of py-spy, beside this Python or in PATH, or None if it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


@contextmanager
def sampled(pid: int, seconds: float) -> Iterator[Counter[str]]:
    """Sample the process for `seconds` while the context is open. Yields a counter that is filled when the context is left: phase ->
    samples.
    """
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stacks"
        command = [
            binary() or "py-spy",
            "record",
            "--pid",
            str(pid),
            "--duration",
            str(round(seconds)),
            "--rate",
            str(_RATE),
            "--nonblocking",
        ]
        recording = subprocess.Popen([*command, "--format", "raw", "--output", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            yield found
            printed, _ = recording.communicate(timeout=_SLACK_S)
        finally:
            recording.kill()
            recording.wait()
        if recording.returncode or not file.exists():
            raise LoadtestError(f"py-spy failed: {printed.decode(errors='replace').strip()[-300:]}")
        found.update(by_phase(file.read_text().splitlines()))


def by_phase(stacks: Iterable[str]) -> Counter[str]:
    """Add up the samples of py-spy's raw format: `outer frame;...;inner frame count`."""
    found: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        found[_phase(stack.split(";"))] += int(count)
    del found["wait"]
    return found


def _phase(frames: list[str]) -> str:
    for frame in reversed(frames):
        for phase, parts in PHASES:
            if any(part in frame for part in parts):
                return phase
    return "other"
