"""A campaign of hostile checkpoints, in a process of its own: what ends in anything but a CheckpointError, and how much memory it took.

`python -m tests.models.checkpoints.hostile FOLDER EXAMPLES`, where FOLDER has a checkpoint in each of its folders. Prints JSON.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from export.kinds.exporter import Options
from export.kinds.load import load
from models.folders.folder import CheckpointError
from tests.service.test_hostile_bundles import ANYTHING, places, put

NUMBERS = st.sampled_from([0, -5, 1, 3, 1000, 100_000, 10**9, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf")])
GARBAGE = (b"", b"null", b"[]", b"\xff", b"[" * 200_000, b'{"a":' * 200_000, b"{}", b'"x"')


def refused(folder: Path) -> str | None:
    """What else than one sentence it ends in."""
    try:
        load(folder, Options())
    except CheckpointError as error:
        return None if "\n" not in str(error) and len(str(error)) < 3_000 else f"not one sentence: {error}"
    except BaseException:
        return traceback.format_exc()
    return None


def headers(folder: Path) -> list[str]:
    """Of the weights: other shapes, offsets, types, sizes."""
    file, found = folder / "model.safetensors", []
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = next(each for each in header if each != "__metadata__")
    for change in (
        {"shape": [2**62]},
        {"shape": [-1]},
        {"shape": [2**62, 0]},
        {"shape": "x"},
        {"dtype": "F4"},
        {"dtype": "I64"},
        {"dtype": None},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": [5, 1]},
        {"data_offsets": [0, 0]},
    ):
        text = json.dumps(header | {name: header[name] | change}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
        found.append(refused(folder))
    for content in (b"", b"\0" * 8, b"\xff" * 16, (2**40).to_bytes(8, "little"), whole[:-1], whole + b"x", b"[" * 100, whole[: 8 + size]):
        file.write_bytes(content)
        found.append(refused(folder))
    file.write_bytes(whole)
    return [each for each in found if each is not None]


def campaign(folder: Path, examples: int) -> list[str]:
    """Another value at every place of every JSON file, other headers, and garbage in every file's place."""
    problems: list[str] = []
    documents = {file: json.loads(file.read_text()) for file in sorted(folder.rglob("*.json")) if file.name != "tokenizer.json"}
    where = [(file, place) for file, document in documents.items() for place in places(document) if place]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.sampled_from(where), ANYTHING | NUMBERS)
    def one(at: tuple[Path, tuple[str | int, ...]], value: Any) -> None:
        file, place = at
        document = json.loads(json.dumps(documents[file]))
        put(document, place, value)
        file.write_text(json.dumps(document))
        if (problem := refused(folder)) is not None:
            problems.append(f"{file.name} {place} {value!r}: {problem}")
        file.write_text(json.dumps(documents[file]))

    one()
    problems += headers(folder)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        for content in GARBAGE:
            (folder / name).write_bytes(content)
            if (problem := refused(folder)) is not None:
                problems.append(f"{name} {content[:10]!r}: {problem}")
        (folder / name).write_bytes(whole)
    return problems


def main(root: Path, examples: int) -> None:
    problems = [f"{folder.name}: {problem}" for folder in sorted(root.iterdir()) for problem in campaign(folder, examples)]
    # Not `ru_maxrss`, which a process inherits from the one that started it.
    high = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    peak = int(high.split()[1]) * 1024
    print(json.dumps({"problems": problems, "peak_bytes": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
