"""The harness: a program is waited for, watched and stopped however the block is left."""

import signal
import subprocess
import sys

import psutil
import pytest

from loadtest.common.server import SHORTCUTS, Program, Server, free_port, summed
from loadtest.errors import LoadtestError
from tests.service.fakes import PATIENCE_S

METRICS = """\
# HELP attnserve_cache_hits_total Inputs answered from the cache
attnserve_cache_hits_total{model="a"} 3.0
attnserve_cache_hits_created{model="a"} 1.7e+09
attnserve_joined_inputs_total{model="a"} 2.0
attnserve_cache_bytes 9000.0
"""
SERVE = "import http.server as h, sys; h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()"
CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('begun', flush=True); time.sleep(600)"


STARTER = """
import sys
from loadtest.common.server import Program
print(Program(["sleep", "600"]).process.pid, flush=True)
sys.stdin.read()
"""


def serving(code: str = SERVE) -> Server:
    port = free_port()
    return Server("test", [sys.executable, "-c", code, str(port)], port=port)


def test_shortcuts_are_hits_and_joined_inputs():
    assert sum(summed(METRICS, SHORTCUTS).values()) == 5
    assert not summed("te_request_count_total 1.0", SHORTCUTS)


def test_a_server_runs_within_the_block_and_not_after_it():
    with serving() as server:
        assert server.start_s > 0
        assert server.process.poll() is None
    assert server.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("error", [KeyboardInterrupt, LoadtestError])
def test_a_server_is_stopped_when_the_block_fails(error: type[BaseException]):
    with pytest.raises(error), serving() as server:
        raise error
    assert server.process.returncode == -signal.SIGTERM


def test_a_server_that_ends_early_is_quoted():
    with pytest.raises(LoadtestError, match="no such bundle"), serving("raise SystemExit('no such bundle')"):
        pass


def test_a_program_ends_with_the_process_that_has_started_it():
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        program = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    program.wait(PATIENCE_S)


def test_a_program_is_killed_with_its_descendants_and_starts_again_with_its_output():
    with Program([sys.executable, "-c", CHILD]) as program:
        program.wait_for("begun")
        (child,) = program.processes("sleep")
        assert program.find("sleep") == child
        program.kill()
        assert (program.process.returncode, psutil.pid_exists(child.pid)) == (-signal.SIGKILL, False)
        assert program.new_lines() == ["begun"]
        program.start()
        program.wait_for("begun\nbegun")
        assert program.new_lines() == ["begun"]
        program.kill()
    assert program.output == "begun\nbegun\n"
