"""Processes of the real service are killed and stopped while clients ask: what they get meanwhile, and that it is whole again soon."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.service.deployment.striking import Clients, Fault, Outcome, ProbeAnswer, hit, requests
from tests.service.fakes import PATIENCE_S
from tests.service.live import LiveService, live

pytestmark = pytest.mark.live

_WHOLE_S = 300.0  # seconds; far more than it takes, for machines that are busy
_HANG_S = 60.0  # no answer takes longer; a request that waits for a stopped process waits for 300 s
KILL, STOP = signal.SIGKILL, signal.SIGSTOP

# A file has a pid and seconds, for which that process blocks its event loop.
_SITECUSTOMIZE = """
import os, threading, time

def act():
    fault = os.environ["ATTNTEST_FAULT"]
    while True:
        time.sleep(0.1)
        try:
            pid, seconds = open(fault).read().split()
        except (OSError, ValueError):
            continue
        if pid != str(os.getpid()):
            continue
        os.unlink(fault)
        (lifeline,) = (thread for thread in threading.enumerate() if thread.name == "lifeline")
        lifeline._args[0].call_soon_threadsafe(time.sleep, float(seconds))

if "ATTNTEST_FAULT" in os.environ:
    threading.Thread(target=act, daemon=True).start()
"""


@pytest.fixture(scope="module")
def bundles(encoder_bundle: Path, decoder_bundle: Path) -> list[Path]:
    return [encoder_bundle, decoder_bundle]


@contextmanager
def under_load(running: LiveService) -> Iterator[Clients]:
    clients = Clients(running.port, requests("tiny-encoder", "tiny-decoder"))
    try:
        time.sleep(1)
        yield clients
    finally:
        clients.stop()


def survived(running: LiveService, clients: Clients, title: str, how: Fault, *, closes: bool = False) -> Outcome:
    """It is whole again, and meanwhile every request had a whole answer, or a 429 or 503 that says when to come again, in time."""
    outcome = hit(running, clients, title, how, within_s=_WHOLE_S)
    assert outcome.ended_with is None, outcome.last_words
    assert outcome.whole_s is not None, (title, how, outcome.statuses, running.output)
    others = {status for status in outcome.statuses if status not in ("200", "429", "503")}
    # The requests that a process had at the client's own connections end with it: HAProxy's, also if the kernel chose it, with lean the
    # replica's (`closes`). If HAProxy's last retry fails too, it closes a connection that it has answered on before: the client must send
    # the request again.
    closing = closes or title == "haproxy" or title.endswith(":gateway")
    lost = {"RemoteDisconnected", "ConnectionResetError"} if closing else set()
    assert others <= lost, (title, how, outcome.statuses)
    assert all(answer.fit for answer in outcome.answers if answer.status in ("200", "503")), (title, how)
    assert outcome.slowest_s < _HANG_S, (title, how, outcome.slowest_s)
    return outcome


def ended(running: LiveService, title: str, how: signal.Signals) -> None:
    """The command has ended with a sentence, and nothing is left of it."""
    runs = {part for part in " ".join(running.find("raylet").cmdline()).split("/") if part.startswith("attnserve-")}
    with under_load(running) as clients:
        outcome = hit(running, clients, title, how, within_s=_WHOLE_S, to_the_end=True)
    assert outcome.ended_with == 1, (title, how, running.output)
    assert "start the service again" in outcome.last_words
    assert "LEFT" not in outcome.last_words
    assert runs
    assert not [run for run in runs if (Path("/tmp") / run).exists()]


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `_SITECUSTOMIZE` reads."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def single(bundles: list[Path], fault: Path) -> Iterator[LiveService]:
    (fault.parent / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    path = os.pathsep.join([str(fault.parent), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with live(bundles, env={"PYTHONPATH": path, "ATTNTEST_FAULT": str(fault)}) as running:
        yield running


def test_profile_single_replaces_what_dies_or_is_stopped(single: LiveService) -> None:
    with under_load(single) as clients:
        for title in ("haproxy", "ServeController", "ServeReplica"):
            for how in (KILL, STOP):
                survived(single, clients, title, how)


def test_a_busy_event_loop_is_no_dead_process(single: LiveService, fault: Path) -> None:
    """It is busy for longer than a process may be stopped. The replica is kept, and its callers are answered."""
    with under_load(single) as clients:
        replica, began = single.find("ServeReplica").pid, time.monotonic()
        fault.write_text(f"{replica} 16")

        def others() -> list[ProbeAnswer]:
            return [answer for answer in list(clients.answers) if answer.began > began and answer.name != "live"]

        deadline = time.monotonic() + PATIENCE_S
        while not (blocked := [answer.ended for answer in others() if answer.ended - answer.began > 10]):
            assert time.monotonic() < deadline, "the loop was not blocked"
            time.sleep(0.1)
        probes = [answer for answer in list(clients.answers) if answer.began > began and answer.name == "live"]
        assert len([answer for answer in probes if answer.ended < min(blocked)]) > 20, "the probes waited for the loop"
        assert {answer.status for answer in probes} == {"200"}
        assert single.find("ServeReplica").pid == replica
    assert {answer.status for answer in others()} <= {"200", "429"}


def test_profile_single_ends_without_rays_gcs(single: LiveService) -> None:
    ended(single, "gcs_server", KILL)


def test_lean(bundles: list[Path]) -> None:
    with live(bundles, "--lean") as running:
        with under_load(running) as clients:
            assert survived(running, clients, "ServeReplica", KILL, closes=True).statuses["503"]
            survived(running, clients, "ServeReplica", STOP, closes=True)
        ended(running, "raylet", KILL)


def test_profile_split_with_two_gateways(bundles: list[Path]) -> None:
    """While one of two gateways is stopped, the other answers. Without its controller Serve replaces nothing: it must come back.

    A 503 with Retry-After is allowed beside it, as everywhere: on a busy machine all replicas of a pool may be silent for too long.
    """
    with live(bundles, "--profile", "split", "--set", "gateways=2", "--development") as running:

        def by_route(generator: psutil.Process) -> None:
            answer = httpx.post(f"http://127.0.0.1:{running.port}/v1/development/kill")
            assert answer.json() == {"pid": generator.pid, "process": "generator"}

        with under_load(running) as clients:
            began = time.monotonic()
            outcome = survived(running, clients, "ServeReplica:attnserve:gateway", STOP)
            meanwhile = [answer for answer in outcome.answers if began < answer.began and answer.ended < outcome.gone]
            assert {"embedding", "text"} <= {answer.name for answer in meanwhile if answer.status == "200"}
            controller = running.find("ServeController")
            survived(running, clients, "ServeController", STOP)
            for title, how in (("gateway", KILL), ("encoder", KILL), ("generator", by_route)):
                survived(running, clients, f"ServeReplica:attnserve:{title}", how)
            assert running.find("ServeController").pid != controller.pid
        ended(running, "raylet", STOP)
