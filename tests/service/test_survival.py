"""Processes of the real service are killed and stopped while clients ask: what they get meanwhile, and that it is whole again soon.

`python -m loadtest.kills` does the same with real bundles and measures it; deploy/faults.md has the figures.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.kills import Clients, Outcome, Victim, hit, requests, victim
from tests.bundles import tiny_encoder_bundle

pytestmark = pytest.mark.service

_WHOLE_S = 60.0  # seconds on a machine of its own; tests share theirs
_HANG_S = 10.0  # no answer takes longer; a stopped process is found within one or two seconds
KILL, STOP = signal.SIGKILL, signal.SIGSTOP

# Blocks the event loop of the one replica for as many seconds as a file says.
_SITECUSTOMIZE = """
import os, threading, time

def wait():
    while not os.path.exists(os.environ["ATTNTEST_BLOCK"]):
        time.sleep(0.1)
    seconds = float(open(os.environ["ATTNTEST_BLOCK"]).read())
    for thread in threading.enumerate():
        if thread.name == "lifeline":
            thread._args[0].call_soon_threadsafe(time.sleep, seconds)

if "ATTNTEST_BLOCK" in os.environ:
    threading.Thread(target=wait, daemon=True).start()
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, decoder_bundle: Path) -> list[Path]:
    return [tiny_encoder_bundle(tmp_path_factory.mktemp("survival") / "tiny"), decoder_bundle]


@contextmanager
def under_load(running: Victim) -> Iterator[Clients]:
    clients = Clients(running.port, requests("tiny-encoder", "tiny-decoder"))
    try:
        time.sleep(1)
        yield clients
    finally:
        clients.stop()


def survived(running: Victim, clients: Clients, title: str, how: signal.Signals, *, without_haproxy: bool = False) -> Outcome:
    """It is whole again, and meanwhile every request had a whole answer or a 503 that says when to come again, in time."""
    outcome = hit(running, clients, title, how, within_s=_WHOLE_S)
    assert outcome.ended_with is None, outcome.last_words
    assert outcome.whole_s is not None, (title, how, outcome.statuses, running.output())
    others = {status for status in outcome.statuses if status not in ("200", "503")}
    # Those that the replica had when it died, where no HAProxy is in between to say so.
    assert others <= ({"RemoteDisconnected", "ConnectionResetError"} if without_haproxy else set()), (title, how, outcome.statuses)
    assert all(answer.fit for answer in outcome.answers if answer.status in ("200", "503")), (title, how)
    assert outcome.slowest_s < _HANG_S, (title, how, outcome.slowest_s)
    return outcome


def ended(running: Victim, title: str, how: signal.Signals) -> None:
    """The command has ended with a sentence, and nothing is left of it."""
    runs = {part for part in " ".join(running.find("raylet").cmdline()).split("/") if part.startswith("attnserve-")}
    with under_load(running) as clients:
        outcome = hit(running, clients, title, how, within_s=_WHOLE_S, to_the_end=True)
    assert outcome.ended_with == 1, (title, how, running.output())
    assert "start the service again" in outcome.last_words
    assert "LEFT" not in outcome.last_words
    assert runs
    assert not [run for run in runs if (Path("/tmp") / run).exists()]


def test_profile_single(bundles: list[Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    block = tmp_path / "block"
    path = os.pathsep.join([str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with victim(bundles, "single", env={"PYTHONPATH": path, "ATTNTEST_BLOCK": str(block)}) as running:
        with under_load(running) as clients:
            for title in ("haproxy", "ServeController", "ServeReplica"):
                for how in (KILL, STOP):
                    survived(running, clients, title, how)
            # A loop that is busy for longer than a process may be stopped is no dead process: it is kept, and its callers are answered.
            replica, began = running.find("ServeReplica").pid, time.monotonic()
            block.write_text("16")
            time.sleep(18)
            probes = [answer for answer in list(clients.answers) if answer.began > began and answer.name == "live"]
            assert len(probes) > 50
            assert {answer.status for answer in probes} == {"200"}
            assert max(answer.ended - answer.began for answer in probes) < _HANG_S
            assert running.find("ServeReplica").pid == replica
        blocked = [answer for answer in clients.answers if answer.began > began and answer.name != "live"]
        assert max(answer.ended - answer.began for answer in blocked) > 10, "the loop was not blocked"
        assert {answer.status for answer in blocked} <= {"200", "429"}
        ended(running, "gcs_server", KILL)


def test_lean(bundles: list[Path]) -> None:
    with victim(bundles, "lean") as running:
        with under_load(running) as clients:
            assert survived(running, clients, "ServeReplica", KILL, without_haproxy=True).statuses["503"]
            survived(running, clients, "ServeReplica", STOP, without_haproxy=True)
        ended(running, "raylet", STOP)


def test_profile_split_with_two_gateways(bundles: list[Path]) -> None:
    with victim(bundles, "split", "--set", "gateways=2") as running:
        with under_load(running) as clients:
            for title in ("gateway", "encoder", "generator"):
                survived(running, clients, f"ServeReplica:attnserve:{title}", KILL)
        ended(running, "raylet", KILL)
