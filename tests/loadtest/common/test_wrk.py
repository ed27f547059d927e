"""What wrk prints is read, and the script sends each body once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.common import wrk
from loadtest.errors import LoadtestError

CAPTURED = """\
Running 2s test @ http://127.0.0.1:37261/v1/embeddings
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    65.59ms   14.20ms 109.43ms   67.30%
    Req/Sec   482.33     70.79   600.00     66.67%
  973 requests in 2.00s, 7.81MB read
Requests/sec:    486.12
Transfer/sec:      3.90MB
RESULT {"requests": 973, "duration_s": 2.001565, "p50_ms": 64.830, \
"connect_errors": 0, "read_errors": 0, "write_errors": 0, "status_errors": 0, "timeouts": 0, "repeated": 0}
"""


def test_a_result_is_read():
    load = wrk.parse(CAPTURED, 32)
    assert load.per_s == pytest.approx(486.12, abs=0.01)
    assert load.per_s_at_most == pytest.approx((973 + 16) / 2.001565)
    assert load.p50_ms == 64.83
    assert load.problems == []


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ('"status_errors": 3', "3 status errors"),
        ('"timeouts": 1', "1 timeouts"),
        ('"repeated": 2', "texts were sent twice: too few were prepared"),
        ('"requests": 0', "no request ended"),
    ],
)
def test_a_run_with_errors_says_so(said: str, problem: str):
    field = said.split(":", maxsplit=1)[0]
    value = CAPTURED[CAPTURED.index(field) :].split(",", maxsplit=1)[0].split("}", maxsplit=1)[0]
    assert wrk.parse(CAPTURED.replace(value, said), 32).problems == [problem]


def test_no_result_is_an_error():
    with pytest.raises(LoadtestError, match="unable to connect"):
        wrk.parse("unable to connect to 127.0.0.1:9 Connection refused", 1)


def test_without_wrk_the_user_learns_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LoadtestError, match="apt-get install wrk"):
        wrk.run("http://127.0.0.1:1/", ["{}"], connections=1, seconds=1)


class Collector(BaseHTTPRequestHandler):
    """Keeps every body; answers 200."""

    protocol_version = "HTTP/1.1"
    bodies: list[str]

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector():
    """A server's URL and the bodies it was sent."""
    handler = type("Handler", (Collector,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/embeddings", handler.bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(not wrk.shutil.which("wrk"), reason="wrk is not installed: apt-get install wrk")
def test_the_script_sends_each_body_once(collector: tuple[str, list[str]]):
    url, received = collector
    bodies = [json.dumps({"input": f'text {n}, with 100 % and \\ "quotes"'}) for n in range(100_000)]
    load = wrk.run(url, bodies, connections=4, seconds=1)
    assert load.problems == []
    assert load.requests <= len(received) == len(set(received)) <= load.requests + 4
    assert set(received) <= set(bodies)


@pytest.mark.skipif(not wrk.shutil.which("wrk"), reason="wrk is not installed: apt-get install wrk")
def test_running_out_of_bodies_is_told(collector: tuple[str, list[str]]):
    assert wrk.run(collector[0], ["{}"], connections=1, seconds=1).problems == ["texts were sent twice: too few were prepared"]
