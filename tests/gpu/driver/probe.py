"""Runs a bundle's graph for GPUs three times, and prints as JSON what the CUDA provider did: `python -m tests.gpu.driver.probe BUNDLE`."""

import ctypes
import json
import sys
from pathlib import Path

from export import contract
from service.encoding.gpu.session import PackedSession

COUNTS = (
    *("launches", "to_device", "to_host", "on_device", "waits", "allocations", "replays", "recordings", "recorded"),
    "copied_while_recording",
)


def counts() -> dict[str, int]:
    numbers = (ctypes.c_long * len(COUNTS))()
    ctypes.CDLL("libcudart.so.13").stub_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


def main(bundle: Path) -> None:
    manifest = contract.verify(bundle)
    gpu = manifest.gpu_graph
    assert gpu is not None
    session = PackedSession(bundle / gpu.graph.file, gpu, max_tokens=manifest.limits.max_tokens)
    calls = []
    for _ in range(3):
        before = counts()
        session.run([manifest.traits.output], [[1, 2, 3], [4]], None)
        calls.append({name: number - before[name] for name, number in counts().items()})
    print(json.dumps(calls))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
