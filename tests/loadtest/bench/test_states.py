"""The benchmark of states runs to its end, each of its rows has a figure, and after a stop it goes on."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from export import contract
from loadtest.bench import states, states_over_http
from loadtest.bench.runner import Contestant, Measurement, Measurements, Unfinished, measure
from loadtest.common.server import MeasuredServer
from loadtest.errors import LoadtestError
from loadtest.in_process import checkpoints, prefixes, stores
from loadtest.in_process import states as in_process
from tests.service.live import LiveService

SMALL: tuple[tuple[Any, str, Any], ...] = (
    (states, "CONTEXTS", (20, 40, 60)),
    (states, "SECONDS", 0.2),
    (in_process, "LONG", 2_000),
    (in_process, "REPEATS", 2),
    (states_over_http, "REPEATS", 2),
    (states_over_http, "STEPS", 20),
    (states, "PREFIXES", (1_024, 1_100)),
    (checkpoints, "PAIRS", 1),
    (prefixes, "REPEATS", 2),
    (stores, "WRITES", 4),
)


def test_every_row_has_a_figure(service: LiveService, decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)

    @contextmanager
    def serving(bundle: Path, model: str, **options: Any) -> Iterator[MeasuredServer]:
        yield MeasuredServer(name="attnserve", pid=1, port=service.port, path="/v1/embeddings", model=model, start_s=1.0)

    monkeypatch.setattr(states, "attnserve", serving)
    CliRunner().invoke(states.app, ["--bundle", str(decoder_bundle), "--rounds", "1", "--many", "100", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert all(row["figures"] for row in rows)
    n_stores = 1 + bool(shutil.which("redis-server"))
    assert len(rows) == 11 + 19 + 3 + 2 + n_stores * (4 + 6 + 14 + 2)
    again = [row for row in rows if "fed again" in row["work"]]
    assert len(again) == 2
    assert all(row["ratio"] > 0 for row in again), "each is beside restoring the state; which is faster, a busy machine decides"
    assert {row["figure"] for row in rows if "blobs of a parent" in row["work"]} == {1}


def test_the_cache_of_the_twin_has_keys_and_values_of_every_head_and_layer() -> None:
    layer = contract.StateTensor(name="state_0_S", shape=(6, 32, 32)), contract.StateTensor(name="state_0_conv", shape=(3, 576))
    manifest = SimpleNamespace(decoder=SimpleNamespace(states=4 * layer))
    assert states.cache_bytes(cast(Any, manifest), 100) == 100 * 4 * 2 * 192 * 4  # tokens, layers, keys and values, width, bytes


def test_an_interrupted_run_goes_on_with_the_turn_that_was_not_measured(tmp_path: Path) -> None:
    measured, done = Measurements(), list[tuple[int, str]]()

    def note(name: str, _: object) -> None:
        if (measured.round, name) == (2, "second") and len(done) == 3:
            raise LoadtestError("interrupted")
        done.append((measured.round, name))
        measured.note("work", name, figure=len(done))

    contestants = [Contestant(name, [Measurement("it", lambda _, name=name: note(name, _))]) for name in ("first", "second")]
    with pytest.raises(LoadtestError):
        measure(contestants, 2, measured, lambda label: None, Unfinished(tmp_path / "kept.json", {"rounds": 2}))
    done.append((0, "stopped"))
    again = measured = Measurements()
    measure(contestants, 2, again, lambda label: None, Unfinished(tmp_path / "kept.json", {"rounds": 2}))
    assert done == [(1, "first"), (1, "second"), (2, "first"), (0, "stopped"), (2, "second")]
    assert [(each["round"], each["contestant"], each["figure"]) for each in again.entries] == [
        (1, "first", 1),
        (1, "second", 2),
        (2, "first", 3),
        (2, "second", 5),
    ]
    measure(contestants, 2, Measurements(), lambda label: None, Unfinished(tmp_path / "kept.json", {"rounds": 3}))
    assert len(done) == 9, "another plan is measured from its beginning"
