"""Compares several training runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.training.curves import draw_runs
from service.errors import AttnserveError


class CompareError(AttnserveError, ValueError):
    """The runs cannot be compared. The message names the runs and the reason."""


def compare(folders: Sequence[Path], out: Path) -> str:
    """Write compare.png and compare.md, and return the table of compare.md. Raises CompareError if a run is unfinished, if two runs have
    the same name, or if the runs were trained on different text."""
    runs = [_read(folder) for folder in folders]
    names = [run["name"] for run in runs]
    if len(set(names)) < len(names):
        raise CompareError(f"two runs have the same name: {', '.join(sorted(names))}; rename one folder")
    if len({run["data"]["train_sha256"] for run in runs}) > 1:
        raise CompareError("the runs were trained on different text, so their figures cannot be compared; give runs with the same data")
    out.mkdir(parents=True, exist_ok=True)
    runs.sort(key=lambda run: run["held_out"]["carried"]["overall"])
    draw_runs({run["name"]: run for run in runs}, out / "compare.png", title="Bits per byte")
    table = _table(runs)
    (out / "compare.md").write_text(table, encoding="utf-8")
    return table


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    if not file.is_file():
        raise CompareError(f"{file} is missing; `python -m models.training train --out {folder}` writes it")
    run = json.loads(file.read_text())
    if "held_out" not in run:
        raise CompareError(f"{folder} is not finished; repeat its command to continue it")
    return run


def _table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| run | layers | parameters | tokens | minutes | tokens/s | bits/byte, carried | bits/byte, windows | hardware |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        layers = run["config"]["model"]["layers"]
        last, held_out = run["losses"][-1], run["held_out"]
        lines.append(
            f"| {run['name']} | {layers if isinstance(layers, str) else ', '.join(layers)} | {run['parameters'] / 1e6:.2f} M "
            f"| {last['tokens'] / 1e6:.2f} M | {last['minutes']:.1f} | {run['tokens_per_s']:,.0f} "
            f"| {held_out['carried']['overall']:.3f} | {held_out['windows']['overall']:.3f} | {run['hardware']} |"
        )
    return "\n".join(lines) + "\n"
