"""A server is waited for and stopped however the block is left."""

import signal
import sys
import time

import pytest

from loadtest.common.server import SHORTCUTS, MeasuredServer, running, summed
from loadtest.errors import LoadtestError
from service.deployment.ports import free_port

METRICS = """\
# HELP attnserve_cache_hits_total Inputs answered from the cache
attnserve_cache_hits_total{model="a"} 3.0
attnserve_cache_hits_created{model="a"} 1.7e+09
attnserve_joined_inputs_total{model="a"} 2.0
attnserve_cache_bytes 9000.0
"""
SERVE = "import http.server as h, sys; h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()"


def serving(code: str = SERVE):
    port = free_port()
    return running("test", [sys.executable, "-c", code, str(port)], {}, f"http://127.0.0.1:{port}/")


def test_shortcuts_are_hits_and_joined_inputs():
    assert sum(summed(METRICS, SHORTCUTS).values()) == 5
    assert not summed("te_request_count_total 1.0", SHORTCUTS)


def test_a_server_runs_within_the_block_and_not_after_it():
    with serving() as (process, start_s):
        assert start_s > 0
        assert process.poll() is None
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("error", [KeyboardInterrupt, LoadtestError])
def test_a_server_is_stopped_when_the_block_fails(error: type[BaseException]):
    with pytest.raises(error), serving() as (process, _):
        raise error
    assert process.returncode == -signal.SIGTERM


def test_a_server_that_ends_early_is_quoted():
    with pytest.raises(LoadtestError, match="no such bundle"), serving("raise SystemExit('no such bundle')"):
        pass


def test_a_body_is_one_text_or_a_list():
    server = MeasuredServer(name="x", pid=1, port=1, path="/v1/embeddings", model="m", start_s=time.monotonic())
    assert server.url == "http://127.0.0.1:1/v1/embeddings"
    assert server.body("a") == '{"model": "m", "input": "a"}'
    assert server.body(["a", "b"]) == '{"model": "m", "input": ["a", "b"]}'
