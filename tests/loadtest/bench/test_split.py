"""What is asked of both profiles, and what of it counts."""

import json
from collections.abc import Sequence

import pytest

from loadtest.bench import split
from loadtest.common import wrk
from loadtest.common.server import MeasuredServer
from loadtest.errors import LoadtestError

SERVER = MeasuredServer(name="attnserve", pid=1, port=8000, path="/v1/embeddings", model="mini", start_s=1.0)


def load(connections: int, *, status_errors: int = 0) -> wrk.Load:
    times = {"p50_ms": 3.0, "p90_ms": 4.0, "p99_ms": 5.0, "max_ms": 6.0}
    errors = {"connect_errors": 0, "read_errors": 0, "write_errors": 0, "timeouts": 0, "repeated": 0}
    return wrk.Load(connections=connections, requests=10 * connections, duration_s=2.0, status_errors=status_errors, **times, **errors)


def test_no_text_and_no_stream_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Sequence[str]]] = []

    def run(url: str, bodies: Sequence[str], *, connections: int, seconds: float) -> wrk.Load:
        sent.append((url, bodies))
        return load(connections)

    monkeypatch.setattr(wrk, "run", run)
    figures = split.figures_of(SERVER, "poet", 1, "round 1")
    assert figures == {split.RATE: 160.0, split.P50: 3.0, split.TOKENS: 80.0 * split.STREAM_TOKENS}
    bodies = [body for _, some in sent for body in some]
    assert len(set(bodies)) == len(bodies)
    assert {json.loads(some[0])["model"] for url, some in sent if url.endswith("/v1/completions")} == {"poet"}


def test_a_run_with_errors_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrk, "run", lambda url, bodies, *, connections, seconds: load(connections, status_errors=3))
    with pytest.raises(LoadtestError, match="3 status errors"):
        split.figures_of(SERVER, "poet", 1, "round 1")
