"""Locust's users against the real application over fake models, on a real socket. Locust runs in processes of its own: it patches its own
standard library only. A run takes some seconds, most of them Locust's start, so what several tests look at is run once.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest

from loadtest.load import locust_run, models, samples
from loadtest.load.plan import DRAIN, LoadPlan, Stage
from loadtest.load.samples import Sample
from service.errors import Overloaded
from tests.service.fakes import fake_app, fake_bundle, serve_in_thread
from tests.service.generation_fakes import FakeGenerator, generator_app

pytestmark = pytest.mark.live

TAKEN = 10  # streams before the fake decoder is full
ENCODER_KINDS = ("embed", "embed_batch", "embed_mixed", "documents", "rerank", "hostile")


def played(url: str, out: Path, mix: dict[str, int], **more: object) -> list[Sample]:
    tasks = models.tasks(url, models.names(url))
    values = {"url": url, "out": out, "seed": 1, "open_loop": True, "rate": 40, "mix": mix, "models": tasks, "max_tokens": 12, **more}
    locust_run.run(LoadPlan(**{"stages": (Stage(name="only", seconds=3, level=1, idle=5, slow=2), DRAIN), **values}))
    return samples.read(out)[0]


@pytest.fixture(scope="module")
def encoder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_in_thread(fake_app(fake_bundle(tmp_path_factory.mktemp("users") / "encoder", name="fake-encoder"))) as url:
        yield url


@pytest.fixture(scope="module")
def from_encoder(encoder_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return played(encoder_url, tmp_path_factory.mktemp("run"), dict.fromkeys(ENCODER_KINDS, 1), rate=60)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """In closed loop: 4 clients of each kind, one stream after the other, until the decoder takes no more."""
    generator = FakeGenerator("fake-decoder")
    generator.engine.refusal, generator.engine.refuse_after = Overloaded("full", retry_after_s=1.0), TAKEN
    mix = {"completion": 1, "chat": 1}
    with serve_in_thread(generator_app(generator)) as url:
        stages = (Stage(name="only", seconds=3, level=1), DRAIN)
        return played(url, tmp_path_factory.mktemp("run"), mix, open_loop=False, rate=8, stages=stages)


def test_every_kind_of_client_gets_the_answers_it_deserves(from_encoder: list[Sample]):
    assert {sample.kind for sample in from_encoder} == set(ENCODER_KINDS)
    assert [sample.problem for sample in from_encoder if sample.problem] == []
    assert all(sample.tokens > 0 and sample.status == 200 for sample in from_encoder if sample.kind != "hostile")


# What a source would sleep is passed over, and what it would send is noted.
ARRIVALS = """
import json
import random
from pathlib import Path
from loadtest.load.plan import LoadPlan, Stage
from loadtest.users import planned

class Noted(list):
    def full(self):
        return False

    def spawn(self, send, due_s):
        self.append(due_s)

planned.IN_FLIGHT, planned.gevent.sleep = Noted(), lambda seconds: None
stages = (Stage(name="only", seconds=30, level=1),)
plan = LoadPlan(url="http://127.0.0.1:1", out=Path(), seed=1, open_loop=True, rate=60, mix={"embed": 1}, models={}, stages=stages)
for number in range(plan.users(1)):
    source = object.__new__(planned.CLASSES["embed"])
    source.plan, source.draw, source._due_s = plan, random.Random(number), 0.0
    while source._due_s < 30:
        source.turn()
print(json.dumps(planned.IN_FLIGHT))
"""


def test_arrivals_of_an_open_loop_are_as_many_as_the_rate_says():
    """By the times at which they are due: 60 a second for 30 seconds, within 5 standard deviations of a Poisson count."""
    ended = subprocess.run([sys.executable, "-c", ARRIVALS], check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    arrivals = sum(due_s < 30 for due_s in json.loads(ended.stdout))
    assert abs(arrivals - 60 * 30) < 5 * (60 * 30) ** 0.5


def test_a_stream_is_timed_to_its_first_token_and_between_tokens(streams: list[Sample]):
    good = [sample for sample in streams if sample.good]
    assert {sample.kind for sample in good} == {"completion", "chat"}
    for sample in good:
        assert sample.tokens == 12
        assert sample.first_ms is not None
        assert sample.between_ms is not None
        assert 0 < sample.first_ms < sample.ms
        assert sample.first_ms + sample.between_ms * (sample.tokens - 1) <= sample.ms


def test_a_refusal_is_noted_with_its_retry_after_and_is_no_failure(streams: list[Sample]):
    refused = [sample for sample in streams if sample.status == 429]
    assert len(refused) > 0
    assert all(sample.retry_after and not sample.problem for sample in refused)
    assert {sample.status for sample in streams} == {200, 429}


def test_a_client_of_a_closed_loop_waits_for_its_answer(streams: list[Sample]):
    moments = [(sample.due_s, 1) for sample in streams] + [(sample.done_s, -1) for sample in streams]
    at_once = most = 0
    for _, step in sorted(moments):
        at_once += step
        most = max(most, at_once)
    assert 1 < most <= 8


def test_the_command_with_two_workers_writes_everything_and_judges(encoder_url: str, tmp_path: Path):
    """A mark that is missed ends it with 1; two workers send their samples to the master."""
    marks = tmp_path / "marks.toml"
    marks.write_text('[[spike]]\nstage = "spike"\nfigure = "embed.p99_ms"\nat_most = 0.001\nwhy = "nobody can"\n')
    asked = ["--url", encoder_url, "--shape", "spike", "--minutes", "0.1", "--knee", "50", "--mix", "embed=1", "--workers", "2"]
    command = [sys.executable, "-m", "service.cli", "load", *asked, "--marks", str(marks), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1, ended.stderr
    assert "FAIL" in ended.stdout
    (out,) = (tmp_path / "out").iterdir()
    written = {file.name for file in out.iterdir() if file.stat().st_size}
    assert {"run.json", "samples.csv", "observations.jsonl", "locust.html", "locust_stats.csv"} <= written
    assert "2 workers" in (out / "locust.log").read_text() or "index 1" in (out / "locust.log").read_text()


def test_a_soak_that_sees_no_process_does_not_pass(encoder_url: str, tmp_path: Path):
    """The service answers in a process that is none of `attnserve`, as one elsewhere does: that its memory stays is not judged."""
    asked = ["--url", encoder_url, "--shape", "soak", "--minutes", "0.1", "--knee", "20", "--mix", "embed=1", "--out", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-m", "service.cli", "load", *asked], check=False, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not judged: not_flat: no process of the service could be followed" in ended.stderr
    (run,) = tmp_path.glob("*/run.json")
    verdicts = {mark["figure"]: mark["verdict"] for mark in json.loads(run.read_text())["marks"]}
    assert verdicts["not_flat"] == "not judged"
    assert (verdicts["not_at_rest"], verdicts["all.error_share"]) == ("pass", "pass")


@pytest.mark.parametrize("workers", [0, 1])
def test_requests_that_the_service_swallows_are_unanswered(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch):
    """Every fifth one hangs: at the end of the run each of them is a sample without an answer, of the stage in which it was due. On a busy
    machine others have no answer either, which the server had not read or was about to answer; no sample is of an
    answer that the server did not give. The folder of the run is where the caller says, and a `locust.conf` beside it is not for this."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locust.conf").write_text("run-time = 1s\ntags = nothing-of-ours\n")
    asked, swallowed, answered, over = count(1), [], [], Event()

    class Swallowing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if not (number := next(asked)) % 5:
                swallowed.append(number)
                over.wait(600)
                self.close_connection = True
                return
            answered.append(number)
            content = json.dumps({"data": [{}], "usage": {"total_tokens": 1}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    # A worker on a busy machine begins seconds after its stage, and reports every three seconds.
    stages = (Stage(name="only", seconds=2 + 4 * workers, level=1), Stage(name="drain", seconds=1 + 9 * workers, level=0))
    with ThreadingHTTPServer(("127.0.0.1", 0), Swallowing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        values = {"url": f"http://127.0.0.1:{server.server_port}", "out": Path("run"), "seed": 1, "open_loop": True, "rate": 20}
        try:
            locust_run.run(LoadPlan(**values, mix={"embed": 1}, models={"embed": "m"}, stages=stages), workers=workers)
        finally:
            over.set()
            server.shutdown()
    found, begun = samples.read(tmp_path / "run")
    lost = [sample for sample in found if not sample.status]
    assert len(lost) >= len(swallowed) > 0
    assert len(found) - len(lost) <= len(answered)
    assert {sample.problem for sample in lost} == {"no answer by the end of the run"}
    heard_s = 30  # after which even a busy load generator has heard that the stage is over
    assert all(begun[0].begin_s <= sample.due_s <= begun[1].begin_s + heard_s for sample in lost)
    assert all(sample.good for sample in found if sample not in lost)


def test_nothing_but_locusts_own_processes_is_patched():
    code = "import sys, loadtest.load.command; sys.exit('gevent' in sys.modules or 'locust' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
