"""Pictures are files with something in them."""

from pathlib import Path

from loadtest.load import figures, knee, plots
from loadtest.load.samples import Sample, StageStart
from tests.loadtest.load.made_up import begun, every
from tests.loadtest.load.test_watch import Growth, observations

STAGES = (("x1", 1.0, 20), ("x2", 2.0, 20))


def run() -> tuple[list[Sample], list[StageStart]]:
    stages = begun(*STAGES)
    refused = every(0.5, 1021.0, 30, status=429, retry_after=True)
    return [*every(0.1, 1000.0, 390, ms=20), *every(0.2, 1000.0, 190, kind="chat", ms=90, first_ms=9.0), *refused], stages


def size(file: Path) -> tuple[int, int]:
    """Width and height of a PNG, from its header."""
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_latency_percentiles_and_tokens_over_time(tmp_path: Path):
    plots.percentiles_over_time(*run(), tmp_path / "percentiles.png", "title")
    plots.tokens_over_time(*run(), tmp_path / "tokens.png", "title")
    assert size(tmp_path / "percentiles.png")[0] == size(tmp_path / "tokens.png")[0] == 990


def test_latency_by_rate_with_and_without_a_knee(tmp_path: Path):
    steps = figures.by_stage(*run())
    for name, found in (("with", knee.knee(steps)), ("without", None)):
        plots.latency_by_rate(steps, found, tmp_path / f"{name}.png", "title")
    assert size(tmp_path / "with.png") == size(tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_processes_over_time_also_of_a_service_elsewhere(tmp_path: Path):
    seen = observations(Growth(rss_mib=10))
    plots.processes_over_time(seen, begun(*STAGES), tmp_path / "here.png", "title")
    plots.processes_over_time([look._replace(processes=[]) for look in seen], begun(*STAGES), tmp_path / "elsewhere.png", "title")
    assert size(tmp_path / "here.png") == size(tmp_path / "elsewhere.png")
