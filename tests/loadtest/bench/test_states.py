"""The benchmark of states runs to its end, and each of its rows has a figure."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.bench import states
from loadtest.in_process import states as in_process


def test_every_row_has_a_figure(decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "CONTEXTS", (20, 40, 60))
    for name, value in (("LONG", 2_000), ("REPEATS", 2), ("WRITES", 4)):
        monkeypatch.setattr(in_process, name, value)
    CliRunner().invoke(states.app, ["--bundle", str(decoder_bundle), "--rounds", "1", "--many", "100", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert all(row["figures"] for row in rows)
    assert len(rows) == 11 + 10 * (1 + bool(shutil.which("redis-server")))
    (again,) = [row for row in rows if "fed again" in row["work"]]
    assert again["ratio"] > 1, "restoring a state takes less time than feeding its prompt"
