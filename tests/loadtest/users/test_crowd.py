"""When the members of a crowd come and come back. In processes of their own, where Locust may patch the standard library."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.service.fakes import PATIENCE_S

MEMBERS = 1000
# What a crowd would sleep is noted, not slept; the service closes its connections twice.
CODE = f"""
import json
from pathlib import Path
from gevent import GreenletExit
from loadtest.load.plan import LoadPlan, Stage
from loadtest.users import crowd

class Members(list):
    def spawn(self, run, *arguments):
        self.append((run, arguments))

stage = Stage(name="crowd", seconds=1, level=1, idle={MEMBERS}, slow=20)
plan = LoadPlan(url="http://127.0.0.1:1", out=Path(), seed=3, open_loop=True, rate=1, mix={{"embed": 1}}, models={{}}, stages=(stage,))
made = crowd.Crowd(plan)
made._idle, made._slow = Members(), Members()
made.become(stage)
slept = []

def sleep(seconds):
    slept[-1].append(seconds)
    if len(slept[-1]) == 3:
        raise GreenletExit

crowd.gevent.sleep = sleep
for run, (member, draw) in made._idle:
    slept.append([])
    try:
        run(lambda: None, draw)
    except GreenletExit:
        pass
print(json.dumps([slept, len(made._slow)]))
"""


@pytest.fixture(scope="module")
def slept() -> list[list[float]]:
    """Of each idle member: before its first connection, and twice before another one."""
    times, slow = played()
    assert (len(times), slow) == (MEMBERS, 20)
    return times


def played() -> tuple[list[list[float]], int]:
    ended = subprocess.run([sys.executable, "-c", CODE], check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    times, slow = json.loads(ended.stdout)
    return times, slow


def test_a_thousand_connections_never_come_in_one_moment(slept: list[list[float]]) -> None:
    """HAProxy closes each after ten seconds: of all three openings no more come in any half second than twice the mean."""
    for opening in range(3):
        moments = [sum(times[: opening + 1]) for times in slept]
        most = max(Counter(int(moment * 2) for moment in moments).values())
        assert most < 2 * MEMBERS / (10 * 2), opening
