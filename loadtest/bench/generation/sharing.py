"""Time to first token of one client, undisturbed and while an endless request of another client has every slot."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from loadtest.common.server import Server
from loadtest.errors import LoadtestError

WARM = 5  # requests before those that count
_TAKEN = 1 << 20  # bytes read at a time from answers that are ignored


def first_tokens_s(server: Server, seconds: float) -> tuple[float, ...]:
    """Seconds from a request to its first token, of requests one after the other, each on a connection of its own."""
    until, waits, number = time.perf_counter() + seconds, list[float](), 0
    while number < 2 * WARM or time.perf_counter() < until:
        number += 1
        waits.append(_first_token_s(server, number))
    return tuple(waits[WARM:])


@contextmanager
def all_slots_taken(server: Server, slots: int) -> Iterator[None]:
    """One streamed request for as many endless texts as there are slots, which is read as fast as it comes."""
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
            raise LoadtestError("the request that should go on has ended")
    finally:
        ended.set()
        connection.shutdown(socket.SHUT_RDWR)
        reading.join()
        connection.close()


def _first_token_s(server: Server, number: int) -> float:
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


def _body(server: Server, **fields: Any) -> bytes:
    return json.dumps({"model": server.model, "stream": True, **fields}).encode()
