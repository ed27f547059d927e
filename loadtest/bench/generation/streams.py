"""Tokens a second of the whole service: streams over HTTP, read by wrk, counted by the service's own metric."""

import json
import threading
import time
from urllib.request import urlopen

from loadtest.common import wrk
from loadtest.common.server import Server
from loadtest.errors import LoadtestError

STREAM_TOKENS = 512
_COUNTER = "vllm:generation_tokens_total{"


def tokens_per_s(server: Server, streams: int, seconds: float) -> float:
    """Of `streams` connections that each ask for one text after the other, all streamed."""
    bodies = [_body(server.model, seed) for seed in range(64 * streams)]
    failure: list[BaseException] = []

    def load() -> None:
        try:
            wrk.run(server.url, bodies, connections=streams, seconds=2 * seconds + 2)
        except BaseException as error:
            failure.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    time.sleep(1 + seconds / 2)
    before, started = drawn(server), time.perf_counter()
    time.sleep(seconds)
    after, elapsed = drawn(server), time.perf_counter() - started
    loading.join()
    if failure:
        raise LoadtestError(f"wrk failed: {failure[0]}") from failure[0]
    return (after - before) / elapsed


def drawn(server: Server) -> float:
    """Tokens that the service has drawn so far."""
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_COUNTER))


def _body(model: str, seed: int) -> str:
    asked = {"model": model, "prompt": f"text {seed}", "seed": seed, "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    return json.dumps(asked)
