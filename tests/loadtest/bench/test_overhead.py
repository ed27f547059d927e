"""What the part `overhead` of `attnserve bench` sends, and how it divides CPU time."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtest.bench import overhead
from loadtest.bench.overhead import FORMS, Form, Overhead
from loadtest.bench.runner import Measurements
from loadtest.common import stacks, wrk
from loadtest.common.server import MeasuredServer
from tests.service.fakes import fake_bundle

SERVER = MeasuredServer(name="attnserve", pid=os.getpid(), port=8000, path="/v1/embeddings", model="mini", start_s=1.0)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_no_input_is_sent_twice(form: Form) -> None:
    bodies = [json.loads(body) for body in form.bodies("mini", 20, "seed")]
    assert {body["model"] for body in bodies} == {"mini"}
    if form.stream:
        inputs = [body["prompt"] for body in bodies]
    else:
        assert {body["encoding_format"] for body in bodies} == {form.encoding}
        inputs = [str(each) for body in bodies for each in (body["input"] if form.inputs > 1 else [body["input"]])]
    assert len(inputs) == len(set(inputs)) == 20 * form.inputs


def test_the_service_takes_the_flag_that_gives_every_stream_a_slot(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "config", *overhead._SLOTS, "--bundle", str(fake_bundle(tmp_path / "b"))]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert int(re.findall(r"slots: (\d+)", shown.stdout)[0]) >= max(form.connections for form in FORMS if form.stream)


def test_cpu_time_is_divided_by_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(url: str, bodies: Sequence[str], *, connections: int, seconds: float) -> SimpleNamespace:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return SimpleNamespace(requests=10, per_s=5.0, p50_ms=1.0, problems=[])

    monkeypatch.setattr(wrk, "run", run)
    measured = Measurements(round=1)
    Overhead(Path(), Path(), 0.1, measured)._load("single", form := Form(8, inputs=32), SERVER)
    (rate,), (cpu,) = measured.of(form.name, "single"), measured.of(form.cpu, "single")
    assert rate["per_s"] == 5 * 32
    assert 150_000 < cpu["us"] * 10 * 32 < 1_000_000
    hello = 2 * len(overhead.HELLO_FORMS) * len(overhead.HELLO)
    assert len(overhead.rows(measured)) == 2 + 2 * len(FORMS) * len(overhead.PROFILES) + hello


@pytest.mark.parametrize("command", overhead.HELLO.values(), ids=lambda command: command[0])
def test_the_servers_for_scale_answer_as_ours_does(command: Sequence[str]) -> None:
    with overhead._hello(command) as server:
        assert [len(vector) for vector in server.embed(["a text"])] == [384]


def test_a_sample_belongs_to_the_innermost_frame_that_has_a_phase() -> None:
    found = stacks.by_phase(
        [
            "run (uvicorn/server.py:1);answer (service/dialects/pages.py:2);encode (service/tokenization/texts.py:3);x (a.py:4) 6",
            "run (uvicorn/server.py:1) 3",
            "main_loop (ray/_private/worker.py:1069) 9",
            "<module> (elsewhere.py:1) 1",
        ]
    )
    assert found == {"tokenise": 6, "read and write HTTP": 3, "other": 1}


def test_without_py_spy_only_the_phases_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "binary", lambda: None)
    measured = Measurements()
    (steps,) = (each.steps for each in Overhead(Path(), Path(), 0.1, measured).contestants() if each.name == "single")
    assert [step.label for step in steps] == [overhead.BARE, *(form.name for form in FORMS)]
    assert "pip install py-spy" in measured.absent[overhead.PHASES]
