"""Measures generation over HTTP: tokens per second of many streams, which wrk reads and the service's own metric counts, and the time to
the first token of one client, alone and while an endless request of another client occupies every slot.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from loadtest.common import wrk
from loadtest.common.server import MeasuredServer, metrics
from loadtest.errors import LoadtestError

STREAM_TOKENS = 512
_COUNTER = "vllm:generation_tokens_total"
WARM = 5  # number of first requests that are not counted, because they warm up the service
_TAKEN = 1 << 20  # largest number of bytes per read of an answer whose content is ignored


def tokens_per_s(server: MeasuredServer, streams: int, seconds: float) -> float:
    """Return the tokens per second that the service samples for `streams` connections. On each, a streamed text is requested and read to
    its end, then the next."""
    bodies = [
        _body(server, prompt=f"text {seed}", seed=seed, max_tokens=STREAM_TOKENS, ignore_eos=True).decode() for seed in range(64 * streams)
    ]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(wrk.run, server.url, bodies, connections=streams, seconds=2 * seconds + 2)
        time.sleep(1 + seconds / 2)
        before, started = sampled_tokens(server), time.perf_counter()
        time.sleep(seconds)
        after, elapsed = sampled_tokens(server), time.perf_counter() - started
        loading.result()
    return (after - before) / elapsed


def sampled_tokens(server: MeasuredServer) -> float:
    """Return the number of tokens that the service has sampled so far."""
    return sum(metrics(server.address, [_COUNTER]).values())


def first_tokens_s(server: MeasuredServer, seconds: float) -> tuple[float, ...]:
    """Return the seconds from the request to the first token, for requests that follow one another for `seconds`, each on a new
    connection."""
    until, waits, number = time.perf_counter() + seconds, list[float](), 0
    while number < 2 * WARM or time.perf_counter() < until:
        number += 1
        waits.append(_first_token_s(server, number))
    return tuple(waits[WARM:])


@contextmanager
def all_slots_taken(server: MeasuredServer, slots: int) -> Iterator[None]:
    """Send one streamed request that occupies all slots: it requests as many endless texts as there are slots. The answer is
    read as fast as it arrives."""
    asked = _body(server, n=slots, max_tokens=1_000_000, ignore_eos=True, prompt="def endless(", seed=1)
    head = f"POST {server.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(asked)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + asked)
    if b" 200 " not in (first := connection.recv(_TAKEN)).split(b"\r\n")[0]:
        raise LoadtestError(f"the request for all slots was answered with {first[:300].decode(errors='replace')}")
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set() and connection.recv(_TAKEN):
            pass
        ended.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        yield
        if ended.is_set():
            raise LoadtestError("the request for endless texts has ended too early")
    finally:
        ended.set()
        connection.shutdown(socket.SHUT_RDWR)
        reading.join()
        connection.close()


def _first_token_s(server: MeasuredServer, number: int) -> float:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body, started = _body(server, max_tokens=8, prompt=f"def f{number}(", seed=number), time.perf_counter()
        connection.request("POST", server.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        waited = time.perf_counter() - started
        if answer.status != 200:
            raise LoadtestError(f"another client's request was answered with {answer.status}: {answer.read(300).decode(errors='replace')}")
        answer.read()
        return waited
    finally:
        connection.close()


def _body(server: MeasuredServer, **fields: Any) -> bytes:
    return json.dumps({"model": server.model, "stream": True, **fields}).encode()
