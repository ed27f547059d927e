"""The figures of the kill campaign, a campaign of two kills on a real service, and `attnserve demo crash`."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.faults import demo
from loadtest.faults.demo import Kill
from loadtest.faults.reading import Choice, Reading
from loadtest.faults.streams import Campaign, Pause, campaign, figures_of, pauses
from loadtest.faults.striking import SplitService, pool_of, service


def test_a_stream_that_was_continued_has_a_pause_for_each_cut() -> None:
    kept, continued = Reading("kept", times=[1.0, 2.0]), Reading("continued", times=[1.0, 4.5, 5.0], connections=2)
    assert [(each.request_id, each.pause_s) for each in pauses([(0, kept), (1, continued)], [1.5, 9.0], connections=2)] == [
        ("continued", 3.5)
    ]


def test_what_was_sent_before_a_fault_and_arrives_later_is_not_the_end_of_its_pause() -> None:
    reading = Reading("late", times=[1.0, 1.52, 4.0])
    (lost,) = pauses([(0, reading)], [1.5])
    assert lost.pause_s == pytest.approx(2.48)
    assert not pauses([(0, reading)], [0.5]), "it had not begun"


def test_the_log_tells_who_is_in_the_pool() -> None:
    def said(message: str, replica: str) -> str:
        return f'{{"time": "2026-11-23T01:18:01.000Z", "level": "INFO", "message": "{message}", "replica": "{replica}"}}\n'

    output = said("a replica has come", "a") + said("a replica has come", "b")
    assert pool_of(output) == (0, 0, 2, 0)
    output += "(raylet) Ray prints from a thread of its own. " + said("a replica is silent", "a") + said("a replica is silent", "b")
    assert pool_of(output) == (0, 2, 2, 2)
    output += said("a replica answers again", "a") + said("a replica has left", "b")
    assert pool_of(output) == (1, 2, 1, 0)


def test_a_campaign_counts_what_was_not_the_same() -> None:
    def read(text: str) -> Reading:
        return Reading(text, {0: Choice(text, {}, "stop")}, 3, times=[0.0, 0.25])

    made = Campaign([read("one two")], [1.0], [(0, read("one two")), (0, read("one"))], [Pause("one", 1.0, 0.5)])
    figures = figures_of(made)
    assert [figures[name] for name in ("streams", "hit", "undisturbed", "pause, p50")] == [2, 1, 0.25, 0.5]
    assert [figures[name][0] for name in ("lost", "doubled", "different", "failed")] == [1, 0, 0, 0]
    assert "lost: request 0 (one): choice 0, character 3" in figures["lost"][1]


def test_the_pause_of_a_kill_ends_before_the_next_kill() -> None:
    reading = Reading(times=[0.0, 0.1, 0.9, 1.0, 1.5, 1.6])
    assert demo.pauses(reading, [Kill(0.2, 1, 5), Kill(1.1, 2, 9)]) == pytest.approx([0.8, 0.5])


# The real service ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(decoder_bundle: Path) -> Iterator[SplitService]:
    """For all faults that it survives with its states on disk: it is whole again after each."""
    with service(decoder_bundle) as started:
        yield started


@pytest.mark.live
@pytest.mark.parametrize("what", ["kill", "gateway", "haproxy"])
def test_streams_are_the_same_after_two_kills(running: SplitService, what: str) -> None:
    same_after_two_faults(running, what)


@pytest.mark.live
def test_streams_are_the_same_after_redis_was_killed_twice(decoder_bundle: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs Redis: apt-get install redis-server")
    with service(decoder_bundle, redis=True) as with_redis:
        same_after_two_faults(with_redis, "redis")


def same_after_two_faults(running: SplitService, what: str) -> None:
    made = campaign(running, 2, what, seed=0, tokens=600)
    assert made.problems() == []
    assert made.lost, "no kill has hit a stream"
    assert len(made.faults) == 2


@pytest.mark.live
def test_demo_crash_shows_the_same_text_twice(decoder_bundle: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "demo", "crash", "--bundle", str(decoder_bundle), "--prompt", "one two"]
    done = subprocess.run([*command, "--tokens", "1500"], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"The same text: 1500 tokens, 2 generators killed, pauses of \d+\.\d\d and \d+\.\d\d s\.", done.stdout)
    killed = re.findall(r"killed generator (\d+) when the client had", done.stdout)
    assert len(set(killed)) == 2
    assert "undisturbed" in done.stdout
